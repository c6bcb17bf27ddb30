"""The queue's database: jobs in their order, and leases of GPUs. One file, one machine.

It holds what people asked for, and who may use a GPU. In what state a job is it does not know.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError, StorageError
from trainer.files import atomic
from trainer.telemetry import locks

DATABASE_FILE = "queue.sqlite"
_VERSION = 1
_PATIENCE_SECONDS = 60.0
_CHANGE_COUNTER = slice(24, 28)
"""Bytes of SQLite's header that count transactions which wrote: sqlite.org/fileformat.html."""
_MACHINE_ID = Path("/etc/machine-id")
_DAMAGED = "the file is damaged: move it away; runs and their folders stay, the order of jobs is lost"
_GO_BACK = "use the version of the trainer that wrote it, or name another TRAINER_QUEUE_DIR"
_REFUSED = "let this user read and write its folder, or name another one in TRAINER_QUEUE_DIR"
_REMEDIES: dict[int, str] = {
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_CANTOPEN: _REFUSED,
    sqlite3.SQLITE_PERM: _REFUSED,
    sqlite3.SQLITE_READONLY: _REFUSED,
    sqlite3.SQLITE_BUSY: "end the process that keeps it, or wait for that",
}
"""Errors of SQLite, those of a full or failing disk apart -> what to do."""
_SCHEMA = """
CREATE TABLE machine (one INTEGER PRIMARY KEY CHECK (one = 1), machine TEXT NOT NULL, boot TEXT NOT NULL);
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    place INTEGER NOT NULL,
    name TEXT NOT NULL,
    group_name TEXT NOT NULL,
    run TEXT NOT NULL,
    working_folder TEXT NOT NULL,
    gpus TEXT NOT NULL,
    gpu_count INTEGER NOT NULL,
    seconds REAL,
    held INTEGER NOT NULL,
    start INTEGER NOT NULL DEFAULT 1
);
CREATE TABLE leases (gpu_uuid TEXT PRIMARY KEY, job INTEGER NOT NULL REFERENCES jobs (id));
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row: a run that was asked for."""

    id: int
    name: str
    group: str
    run: Path
    working_folder: Path
    gpus: tuple[str, ...]
    count: int
    seconds: float | None
    held: bool
    start: int
    """Number of the start that counts: the next one, or the one that was made last."""
    leases: tuple[str, ...]
    """UUIDs of the GPUs that it has."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The identity of a machine and of its boot: process ids and locks mean nothing beyond these."""

    id: str
    """/etc/machine-id; empty where there is none, as in many containers."""
    boot: str

    @classmethod
    def here(cls) -> Machine:
        """This machine now."""
        try:
            text = _MACHINE_ID.read_text().strip()
        except OSError:
            text = ""
        return cls(id=text, boot=locks.boot_id())


@contextlib.contextmanager
def transaction(folder: Path, machine: Machine | None) -> Iterator[sqlite3.Connection]:
    """All or nothing: the only writer of the database in `folder` for as long as the block runs. Without a
    `machine` it is there and stays as it is, whichever machine's.

    Raises ConfigError where the file is another machine's or a newer version's, StorageError where it cannot
    be read or written.
    """
    path = folder / DATABASE_FILE
    try:
        with contextlib.closing(_connected(path)) as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            if machine is not None:
                _prepare(connection, path, machine)
            yield connection
    except sqlite3.DatabaseError as error:
        raise _unusable(path, error) from error


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_PATIENCE_SECONDS, isolation_level=None)
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def read_jobs(folder: Path) -> list[Job]:
    """All jobs in their order, as they are at one moment, whichever machine's; none without a database.

    Raises StorageError where it cannot be read, or is a newer version's, ConfigError where no folder is
    named.
    """
    path = folder / DATABASE_FILE
    with atomic.reading_told(path):
        if not path.is_file():
            if folder.exists() and not folder.is_dir():
                raise ConfigError("the queue's folder is no folder", where=str(folder), remedy=_REFUSED)
            return []
    try:
        with contextlib.closing(_connected(path)) as connection, connection:
            connection.execute("BEGIN")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:  # its tables may be others
                raise StorageError(_newer(version), where=str(path), remedy=_GO_BACK)
            return jobs(connection)
    except sqlite3.DatabaseError as error:
        raise _unusable(path, error) from error


def changes(folder: Path) -> bytes | None:
    """A value that another transaction which writes changes; None without a database. Opens no connection.

    Raises StorageError where it cannot be read.
    """
    path = folder / DATABASE_FILE
    with atomic.reading_told(path):
        try:
            with path.open("rb") as file:
                return file.read(_CHANGE_COUNTER.stop)[_CHANGE_COUNTER]
        except FileNotFoundError:
            return None


def _newer(version: int) -> str:
    return f"a newer trainer wrote this queue (version {version})"


def _unusable(path: Path, error: sqlite3.DatabaseError) -> StorageError:
    # the low byte is the kind, the rest its details: sqlite.org/rescode.html
    remedy = _REMEDIES.get(error.sqlite_errorcode & 0xFF, "free space on its disk, or repair that")
    return StorageError(f"the queue's database cannot be used: {error}", where=str(path), remedy=remedy)


def _prepare(connection: sqlite3.Connection, path: Path, machine: Machine) -> None:
    """Make the tables in a new file; see that an old one is this machine's, whichever boot."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute("INSERT INTO machine VALUES (1, ?, ?)", (machine.id, machine.boot))
        connection.execute(f"PRAGMA user_version = {_VERSION}")
        return
    if version != _VERSION:
        raise ConfigError(_newer(version), where=str(path), remedy=_GO_BACK)
    known, boot = connection.execute("SELECT machine, boot FROM machine").fetchone()
    if boot == machine.boot:
        if machine.id and not known:  # a container without the file began it
            connection.execute("UPDATE machine SET machine = ?", (machine.id,))
        return
    if not machine.id or known != machine.id:
        raise ConfigError(
            "this queue is another machine's, or a machine's that started anew and has no /etc/machine-id:"
            " a queue is for one machine, whose locks and processes it sees",
            where=str(path),
            remedy="name a TRAINER_QUEUE_DIR on a disk of this machine; containers keep a queue over restarts"
            " of the machine where the host's /etc/machine-id is mounted",
        )
    connection.execute("UPDATE machine SET boot = ?", (machine.boot,))


def jobs(connection: sqlite3.Connection) -> list[Job]:
    """All jobs in their order; none in a file without tables, as where the first job was refused."""
    if not connection.execute("PRAGMA user_version").fetchone()[0]:
        return []
    leases: dict[int, list[str]] = {}
    for uuid, job in connection.execute("SELECT gpu_uuid, job FROM leases ORDER BY rowid"):
        leases.setdefault(job, []).append(uuid)
    rows = connection.execute(
        "SELECT id, name, group_name, run, working_folder, gpus, gpu_count, seconds, held, start FROM jobs"
        " ORDER BY place, id"
    )
    return [
        Job(
            id=row[0],
            name=row[1],
            group=row[2],
            run=Path(row[3]),
            working_folder=Path(row[4]),
            gpus=tuple(json.loads(row[5])),
            count=row[6],
            seconds=row[7],
            held=bool(row[8]),
            start=row[9],
            leases=tuple(leases.get(row[0], ())),
        )
        for row in rows
    ]
