"""Jobs that this user's queue handed to clusters: one small file each. Their states are the cluster's."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError, StorageError
from trainer.files import atomic
from trainer.queue.launcher import ENDED, Request, Seen

_FOLDER = "clusters"
_NAME = re.compile(r"(?P<launcher>[a-z]+)-(?P<job>[A-Za-z0-9][A-Za-z0-9.-]*)")


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job that a cluster took."""

    launcher: str
    job: str
    """Its name in the cluster."""
    name: str
    """Its name for people."""
    group: str
    run: str
    """Its run folder, as the cluster's machines name it."""
    folder: str = ""
    """Where its configuration and its output are on this machine; empty where they are the cluster's."""

    @property
    def word(self) -> str:
        """Its name in `trainer queue`: `slurm-12`."""
        return f"{self.launcher}-{self.job}"


def kept(queue: Path, launcher: str = "") -> list[Submitted]:
    """The jobs of a launcher, or of all, by their age. Raises StorageError for a damaged record."""
    with atomic.reading_told(queue / _FOLDER):
        paths = [path for path in (queue / _FOLDER).glob("*.json") if _NAME.fullmatch(path.stem)]
        by_age = sorted(paths, key=lambda path: path.stat().st_mtime_ns)
    found = [_read(path) for path in by_age]
    return [one for one in found if launcher in ("", one.launcher)]


def changes(queue: Path) -> tuple[int, frozenset[str]] | None:
    """A value that changes with every job that is kept or dropped: the time of the folder, which may stay the
    same within a few milliseconds, and the names in it. None where none ever was. Raises StorageError where
    that cannot be read.
    """
    folder = queue / _FOLDER
    with atomic.reading_told(folder):
        try:
            return folder.stat().st_mtime_ns, frozenset(os.listdir(folder))  # noqa: PTH208  names alone
        except FileNotFoundError:
            return None


def since(queue: Path, one: Submitted) -> float:
    """The time at which a job was written down, in Unix seconds; 0.0 where its record is gone."""
    try:
        return (queue / _FOLDER / f"{one.word}.json").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def keep(queue: Path, one: Submitted) -> None:
    """Write a job down. Raises StorageError."""
    folder = queue / _FOLDER
    with atomic.no_space_told(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic.write_text(folder / f"{one.word}.json", json.dumps(dataclasses.asdict(one)))


def require_own_folders(jobs: Sequence[tuple[Submitted, Seen]], requests: Sequence[Request]) -> None:
    """Raise ConfigError where two of `requests` would write into one run folder, or one where one of `jobs`
    does.
    """
    runs = [str(request.run) for request in requests]
    busy = [one for one, seen in jobs if one.run in runs and seen.state not in ENDED]
    if busy or len(set(runs)) < len(runs):
        what = f"{busy[0].name} ({busy[0].word}) writes there" if busy else "two of these jobs write there"
        where = busy[0].run if busy else ", ".join(runs)
        raise ConfigError(what, where=where, remedy="choose another output_dir")


def drop(queue: Path, one: Submitted) -> None:
    """Take a job off the list."""
    (queue / _FOLDER / f"{one.word}.json").unlink(missing_ok=True)


def _read(path: Path) -> Submitted:
    with atomic.reading_told(path):
        text = path.read_bytes()
    try:
        one = Submitted(**json.loads(text))
    except (TypeError, ValueError) as error:
        remedy = "remove it; the job itself is the cluster's, and stays"
        raise StorageError("no record of a job: it was damaged", where=str(path), remedy=remedy) from error
    if one.word != path.stem or not all(isinstance(value, str) for value in dataclasses.astuple(one)):
        remedy = "remove it; the job itself is the cluster's, and stays"
        raise StorageError("no record of this job: it was damaged", where=str(path), remedy=remedy)
    return one
