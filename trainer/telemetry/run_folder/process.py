"""process.json of a run's folder: the process that trains there, or trained there last, and how it ended.

The training process writes it once the run is accepted and its folder locked; its supervisor adds the end.
An attempt that was refused before leaves the record of the attempt before it as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.secrets import redacted
from trainer.errors import Problem, TrainerError, meaning, one_line
from trainer.files import atomic
from trainer.files.json_object import is_finite, read_object
from trainer.telemetry import locks
from trainer.telemetry.rundir import CONFIG_FILE, LOCK_FILE
from trainer.telemetry.status import LOCK_FILE as RUNTIME_LOCK

PROCESS_FILE, ERROR_FILE = "process.json", "error.json"
_MOST_BYTES = 1 << 20
LOST = "ended without an exit code: killed, or the machine went down; it can be resumed"
"""Meaning of an end that nobody was left to record."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """The process that trains in a folder, or trained there last."""

    supervisor: int
    """Process id of its supervisor, in the set of processes `processes` of the boot `boot`."""
    boot: str
    processes: str
    runtime_dir: str
    """Folder of its status, metrics and control requests; empty for an attempt that was refused."""
    started_unix_seconds: float
    working_folder: str = ""
    """Folder that relative paths of its configuration begin at; empty where that is not recorded, as for a
    name with control characters."""
    ended_unix_seconds: float | None = None
    """None while it trains, and where nobody was left to record its end; so is the exit code."""
    exit_code: int | None = None
    cause: str = ""
    """Why it ended, where it did not end by itself."""
    problems: tuple[Problem, ...] = ()
    """Errors that it ended with."""

    @property
    def place(self) -> locks.Place:
        """The place in which its process ids are those of processes."""
        return {"boot": self.boot, "processes": self.processes}


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of a run's last attempt."""

    exit_code: int | None
    """None where nobody was left to record one."""
    meaning: str
    """The exit code in words."""
    cause: str = ""
    """More about it than its meaning, where it was killed; of an error the first problem in words."""
    problems: tuple[Problem, ...] = ()
    """Errors that the training process ended with."""
    unix_seconds: float | None = None


def begin(run_dir: Path, *, supervisor: int, runtime_dir: Path) -> None:
    """Record that this process trains in `run_dir` from now on, which holds the folder's lock.

    Raises StorageError.
    """
    try:
        here = str(Path.cwd())
    except FileNotFoundError:  # it was removed
        here = ""
    process = Process(
        supervisor=supervisor,
        runtime_dir=str(runtime_dir.absolute()),
        started_unix_seconds=time.time(),
        working_folder=here if one_line(here) == here else "",
        **locks.place(),
    )
    _write(run_dir, process)


def end(run_dir: Path, *, supervisor: int, exit_code: int, cause: str, problems: Sequence[Problem]) -> None:
    """Add the end of the process that this supervisor watched to the folder's record. Raises StorageError.

    An attempt that was refused is recorded only where none was ever accepted: a folder of another run, or of
    this one's earlier attempt, keeps its record.
    """
    process = read_process(run_dir)
    if process is None or not process.runtime_dir:
        accepted = (run_dir / CONFIG_FILE).exists() or locks.is_held(run_dir / LOCK_FILE)
        if accepted or not run_dir.is_dir():
            return
        process = Process(
            supervisor=supervisor, runtime_dir="", started_unix_seconds=time.time(), **locks.place()
        )
    own = process.supervisor == supervisor and process.place == locks.place()
    if not own or process.exit_code is not None:
        return
    ended = dataclasses.replace(
        process,
        ended_unix_seconds=time.time(),
        exit_code=int(exit_code),
        cause=cause,
        problems=tuple(problems),
    )
    _write(run_dir, ended)


def working_folder(run_dir: Path) -> Path | None:
    """The folder that relative paths in a run's configuration begin at; None where that is not recorded."""
    process = read_process(run_dir)
    return None if process is None or not process.working_folder else Path(process.working_folder)


def read_process(run_dir: Path) -> Process | None:
    """The record of a folder; None without one, and for one that is damaged."""
    raw = read_object(run_dir / PROCESS_FILE, _MOST_BYTES)
    try:
        process = Process(**{**raw, "problems": _problems(raw.get("problems", ()))})
    except TypeError:
        return None
    return process if _is_sound(process) else None


def _is_sound(process: Process) -> bool:
    """True if every value is of its type, and the folder's name could be one: JSON may hold anything."""
    code, ended = process.exit_code, process.ended_unix_seconds
    words: tuple[object, ...] = (
        process.boot,
        process.processes,
        process.runtime_dir,
        process.working_folder,
        process.cause,
    )
    whole: tuple[object, ...] = (process.supervisor, 0 if code is None else code)
    times: tuple[object, ...] = (process.started_unix_seconds, 0.0 if ended is None else ended)
    return (
        all(isinstance(one, str) for one in words)
        and all(isinstance(one, int) for one in whole)
        and all(isinstance(one, int | float) and is_finite(one) for one in times)
        and all(one_line(name) == name for name in (process.runtime_dir, process.working_folder))
    )


def is_running(run_dir: Path, process: Process | None) -> bool:
    """True if a process trains in the folder, or its supervisor is about to record its end.

    The first holds the folder's lock, the second that of the runtime folder: both are seen across containers.
    """
    if locks.is_held(run_dir / LOCK_FILE):
        return True
    return process is not None and process.exit_code is None and is_supervised(process)


def is_supervised(process: Process) -> bool:
    """True if the supervisor of this process holds its runtime folder, as far as that is seen from here."""
    if not process.runtime_dir:
        return False
    holder = {**process.place, "supervisor": process.supervisor}
    return locks.is_held_by(Path(process.runtime_dir) / RUNTIME_LOCK, holder)


def end_of(process: Process) -> End:
    """The end of a process that does not train any more."""
    code = process.exit_code
    if code is None:
        return End(exit_code=None, meaning=LOST)
    return End(
        exit_code=code,
        meaning=meaning(code),
        cause=process.cause or _cause(process.problems),
        problems=process.problems,
        unix_seconds=process.ended_unix_seconds,
    )


def _cause(problems: Sequence[Problem]) -> str:
    """The first problem with its place, and how many more there are."""
    if not problems:
        return ""
    first, more = problems[0], len(problems) - 1
    return f"{first.where + ': ' if first.where else ''}{first.what}{f' (and {more} more)' if more else ''}"


def write_error(runtime_dir: Path, error: TrainerError) -> None:
    """Leave the problems of a rank in its folder for the supervisor; a disk that takes nothing is let be."""
    problems = [dataclasses.asdict(problem) for problem in error.problems]
    with contextlib.suppress(OSError, TrainerError):  # the exit code is worth more than its note
        text = redacted(json.dumps({"problems": problems}))
        atomic.write_text(runtime_dir / ERROR_FILE, text, sync=False)


def read_error(runtime_dir: Path) -> tuple[Problem, ...]:
    """The problems that a rank left in its folder; none without."""
    return _problems(read_object(runtime_dir / ERROR_FILE, _MOST_BYTES).get("problems", ()))


def _problems(rows: Any) -> tuple[Problem, ...]:
    """Problems of a file; rows that were not written by us are left out."""
    names = [field.name for field in dataclasses.fields(Problem)]
    sound = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    texts = [{name: row[name] for name in names if isinstance(row.get(name), str)} for row in sound]
    return tuple(Problem(**text) for text in texts if "what" in text)


def _write(run_dir: Path, process: Process) -> None:
    text = redacted(json.dumps(dataclasses.asdict(process), indent=1, sort_keys=True))
    atomic.write_text(run_dir / PROCESS_FILE, text + "\n")
