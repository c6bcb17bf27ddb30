"""A job's own folder beside the database: its configuration, its lock, what its starts left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

from trainer.errors import ExitCode, StorageError, TrainerError
from trainer.files import atomic
from trainer.telemetry import locks, status

CONFIG_FILE = "config.yaml"
PICTURES_FILE = "pictures"
"""Number of the pictures that a job draws; a job without it trains."""
OUTPUT_FILE = "output.log"
"""Everything that the job's starts printed."""
RUNTIME = "runtime"
"""TRAINER_RUNTIME_DIR of its runs."""
_LOCK_FILE = "lock"
"""Held by the process that watches a start, and by the supervisor below it."""
_BEGAN, _EXIT, _STOP = "began.json", "exit.json", "stop.json"


def job_folder(folder: Path, job: int) -> Path:
    """The folder of a job of the queue in `folder`; it need not exist."""
    return folder / "jobs" / str(job)


def numbers(folder: Path) -> list[int]:
    """The numbers of all jobs that have a folder, whether or not the database knows them."""
    return [int(path.name) for path in (folder / "jobs").glob("*") if path.name.isdecimal()]


def pictures(folder: Path) -> int | None:
    """Number of the pictures that a job draws; None for a job that trains. Raises StorageError."""
    path = folder / PICTURES_FILE
    with atomic.reading_told(path):
        text = path.read_text().strip() if path.is_file() else None
    if text is not None and not (text.isascii() and text.isdecimal()):
        what = f"{text[:20]!r} is no number of pictures: the file was damaged"
        raise StorageError(what, where=str(path), remedy="take the job off the list, and draw it again")
    return None if text is None else int(text)


def gpu_lock(folder: Path, uuid: str) -> Path:
    """The lock file that runs on this GPU share, whoever started them; see `locks.sharing`."""
    return folder / f"{uuid}.lock"


def is_alive(folder: Path) -> bool:
    """True if a process of the job's run lives: it holds the job's lock, or that of its runtime folder."""
    runtime = folder / RUNTIME / status.LOCK_FILE
    return locks.is_held(folder / _LOCK_FILE) is True or locks.is_held(runtime) is True


def take_lock(folder: Path) -> int | None:
    """The descriptor of the job's lock, now held, for the process that will watch; None where it is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # somebody lives, or looks whether anybody does
        os.close(descriptor)
        return None
    return descriptor


def fail(folder: Path, start: int, error: TrainerError) -> None:
    """Record that a start was made and ended at once with BAD_CONFIG, with the error as its output."""
    output = folder / OUTPUT_FILE
    with atomic.no_space_told(output), output.open("a") as file:
        file.write(f"queue: the job cannot be started: {error}\n")
    write_began(folder, start)
    write_exit(folder, start, ExitCode.BAD_CONFIG)


def write_began(folder: Path, start: int) -> None:
    """Record that a start of this number was made; what the last one said of itself is removed before."""
    (folder / RUNTIME / status.STATUS_FILE).unlink(missing_ok=True)
    _write(folder / _BEGAN, start, 0)


def withdraw_began(folder: Path) -> None:
    """Record that the start was not made."""
    (folder / _BEGAN).unlink(missing_ok=True)


def write_exit(folder: Path, start: int, exit_code: int) -> None:
    """Record what a start ended with."""
    _write(folder / _EXIT, start, exit_code)


def write_stop(folder: Path, start: int) -> None:
    """Ask the run of this start to save and end."""
    _write(folder / _STOP, start, 0)


def withdraw_stop(folder: Path) -> None:
    """Take a request to stop back; one that was seen is not undone."""
    (folder / _STOP).unlink(missing_ok=True)


def began(folder: Path, start: int) -> bool:
    """True if a start of this number was made."""
    return _read(folder / _BEGAN, start) is not None


def asked_to_stop(folder: Path, start: int) -> bool:
    """True if this start was asked to save and end."""
    return _read(folder / _STOP, start) is not None


def exit_code(folder: Path, start: int) -> int | None:
    """The exit code of this start; None where it has none. Of one whose watcher was killed the supervisor's
    note counts.
    """
    code = _read(folder / _EXIT, start)
    if code is not None or not began(folder, start):
        return code
    found = status.read_status(folder / RUNTIME)
    return None if found is None else found.exit_code


def _write(path: Path, start: int, value: int) -> None:
    atomic.write_text(path, json.dumps({"start": start, "value": value}))


def _read(path: Path, start: int) -> int | None:
    """The value that a file has for this start; None where it is another one's, absent or damaged."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        content = json.loads(path.read_bytes())
        if content.get("start") == start and isinstance(content.get("value"), int):
            value: int = content["value"]
            return value
    return None
