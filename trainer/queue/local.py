"""The queue of one machine: jobs in their order, one lease per GPU, runs that outlive it.

Any number of processes may use one queue at a time, and start its jobs: leases are taken all or none in one
transaction, and whether a run lives its locks say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.config import environment, launchers
from trainer.config.interpreter import python
from trainer.errors import ConfigError, StorageError
from trainer.files import atomic
from trainer.machine.idle import VISIBLE
from trainer.machine.occupancy import GpuUse, gpu_uses, visible
from trainer.queue import database, jobfiles
from trainer.queue.database import Job, Machine
from trainer.queue.launcher import ALIVE, CPU, ENDED, Request, Seen, State, judged
from trainer.queue.turns import label, turns
from trainer.telemetry import locks, rundir
from trainer.telemetry.supervising.signals import kept_back

_PLACED = ALIVE | ENDED
"""States of jobs whose place says nothing about when they start."""
TRAIN, DRAW = ("-m", "trainer", "train"), ("-m", "trainer", "sample")


def usable_gpus() -> tuple[GpuUse, ...]:
    """The GPUs of this machine, without those that CUDA_VISIBLE_DEVICES hides, and who uses them."""
    return visible(gpu_uses(), environment.snapshot())


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start that was decided: its leases are taken."""

    job: Job
    gpus: tuple[str, ...]
    lock: int
    """Descriptor of the job's lock."""


@dataclass(eq=False, kw_only=True)
class Local:
    """A `Launcher` for this machine. Several may share one `folder`, on a file system that has locks."""

    folder: Path
    gpus: Callable[[], tuple[GpuUse, ...]] = usable_gpus
    machine: Callable[[], Machine] = Machine.here
    command: Sequence[str] = field(default_factory=lambda: python(*TRAIN))
    """Command line to which the path of a job's configuration is added."""
    drawing: Sequence[str] = field(default_factory=lambda: python(*DRAW))
    """The same of jobs that draw a try; `--try=FOLDER` follows."""
    children: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)
    """Watchers that this process started, to be waited for."""

    def submit(self, requests: Sequence[Request], *, in_place_of: Sequence[str] = ()) -> list[str]:
        """Take in all of these jobs or none, behind all others; their numbers. Those in whose place they come
        are forgotten then, as `forget` does.

        Raises ConfigError where a run folder is another job's, or GPUs are asked for that are not there.
        """
        known = self.gpus() if requests else ()
        with self._changing() as connection:
            gone = [self._take_off(connection, job) for job in in_place_of]
            jobs = database.jobs(connection)
            for number, request in enumerate(requests):
                self._require_possible(request, known)
                self._require_own_folder(request, jobs, requests[:number])
            numbers = [str(self._insert(connection, request)) for request in requests]
        for job in gone:
            shutil.rmtree(jobfiles.job_folder(self.folder, job), ignore_errors=True)
        return numbers

    def _insert(self, connection: sqlite3.Connection, request: Request) -> int:
        (place,) = connection.execute("SELECT COALESCE(MAX(place), 0) + 1 FROM jobs").fetchone()
        (last,) = connection.execute("SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence").fetchone()
        # a folder may be that of a run which lives, and whose database was moved away
        job = 1 + max([last, *jobfiles.numbers(self.folder)])
        connection.execute(
            "INSERT INTO jobs (id, place, name, group_name, run, working_folder, gpus, gpu_count, seconds,"
            " held) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                job,
                place,
                request.name,
                request.group,
                str(request.run),
                str(request.working_folder),
                json.dumps(request.gpus),
                request.count,
                request.seconds,
                request.held,
            ),
        )
        folder = jobfiles.job_folder(self.folder, job)
        with atomic.no_space_told(folder):
            (folder / jobfiles.RUNTIME).mkdir(parents=True)
        atomic.write_text(folder / jobfiles.CONFIG_FILE, request.config)
        if request.pictures is not None:
            atomic.write_text(folder / jobfiles.PICTURES_FILE, str(request.pictures))
        return int(job)

    def _require_possible(self, request: Request, known: Sequence[GpuUse]) -> None:
        if not known:  # the process that starts jobs may see some
            return
        there = [gpu.uuid for gpu in known]
        for uuid in request.gpus:
            if uuid not in (*there, CPU):
                remedy = f"GPUs that are there: {', '.join(there)}"
                raise ConfigError(f"GPU {uuid} is not there", where=request.name, remedy=remedy)
        if not request.gpus and request.count > len(known):
            what = f"more GPUs are asked for ({request.count}) than there are ({len(known)})"
            raise ConfigError(what, where=request.name, remedy="ask for fewer GPUs")

    def _require_own_folder(self, request: Request, jobs: Sequence[Job], others: Sequence[Request]) -> None:
        for job in jobs:
            if job.run == request.run and self._seen(job).state not in ENDED:
                raise ConfigError(
                    f"{label(job)} writes there",
                    where=str(request.run),
                    remedy="choose another output_dir, or release that job to go on with its run",
                )
        if any(other.run == request.run for other in others):
            remedy = "choose another output_dir for one of them"
            raise ConfigError("two of these jobs write there", where=str(request.run), remedy=remedy)

    def in_use(self, known: Sequence[GpuUse]) -> dict[str, str]:
        """UUIDs of GPUs on which others run than jobs alone -> who, in words."""
        locked = (
            gpu for gpu in known if locks.is_held(jobfiles.gpu_lock(self.folder, gpu.uuid), shared=True)
        )
        beside = {gpu.uuid: "in use by a run that was started beside the queue" for gpu in locked}
        return beside | {gpu.uuid: gpu.use for gpu in known if gpu.use}

    def jobs(self) -> list[tuple[Job, Seen]]:
        """All jobs in their order, each with its state now."""
        return [(job, self._seen(job)) for job in database.read_jobs(self.folder)]

    def job(self, job: str) -> Job:
        """The job of this number. Raises ConfigError where there is none."""
        return _named(database.read_jobs(self.folder), job)

    def state(self, job: str) -> Seen:
        """The state of a job now. Raises ConfigError where there is none."""
        return self._seen(self.job(job))

    def _seen(self, job: Job) -> Seen:
        folder = jobfiles.job_folder(self.folder, job.id)
        # alive is asked first: what ends in between has left its exit code
        alive = jobfiles.is_alive(folder)
        return judged(
            alive=alive,
            began=jobfiles.began(folder, job.start),
            exit_code=jobfiles.exit_code(folder, job.start),
            held=job.held,
            asked=jobfiles.asked_to_stop(folder, job.start),
        )

    def log(self, job: str) -> str:
        """All that the job's starts printed."""
        path = jobfiles.job_folder(self.folder, self.job(job).id) / jobfiles.OUTPUT_FILE
        with atomic.reading_told(path):
            return path.read_text(errors="replace") if path.is_file() else ""

    def stop(self, job: str) -> None:
        """Ask a run to save and end; it is held then. One that has not begun is held."""
        self._hold(job, ask=True)

    def hold(self, job: str) -> None:
        """Have a job not start, or not go on when it is stopped from outside, until `release`."""
        self._hold(job, ask=False)

    def _hold(self, job: str, *, ask: bool) -> None:
        with self._changing() as connection:
            one = _named(database.jobs(connection), job)
            seen = self._seen(one)
            if seen.state in ENDED:
                what = f"{label(one)} has ended: {seen.words or seen.state}"
                raise ConfigError(what, where="queue", remedy="there is nothing to hold or stop")
            connection.execute("UPDATE jobs SET held = 1 WHERE id = ?", (one.id,))
            if ask and seen.state in ALIVE:
                jobfiles.write_stop(jobfiles.job_folder(self.folder, one.id), one.start)

    def release(self, job: str) -> None:
        """Let a held job start; let one that ended otherwise than well go on, at its place.

        Raises ConfigError for one that has finished.
        """
        with self._changing() as connection:
            one = _named(database.jobs(connection), job)
            seen = self._seen(one)
            if seen.state is State.FINISHED:
                remedy = "add its configuration again, with more steps"
                raise ConfigError(f"{label(one)} has finished", where="queue", remedy=remedy)
            connection.execute("UPDATE jobs SET held = 0 WHERE id = ?", (one.id,))
            jobfiles.withdraw_stop(jobfiles.job_folder(self.folder, one.id))
            if seen.state in ENDED:
                self._count_start(connection, one)

    def move(self, jobs: Sequence[str], place: int) -> None:
        """Put jobs, one behind the other, at a place among all others that have not begun or are held; the
        first is 1. Runs that live then stand before all of these.
        """
        with self._changing() as connection:
            known = database.jobs(connection)
            states = {job.id: self._seen(job).state for job in known}
            moved = [_named(known, job) for job in jobs]
            order = [other for other in known if other not in moved]
            places = [index for index, other in enumerate(order) if states[other.id] not in _PLACED]
            index = places[max(0, place - 1)] if place <= len(places) else len(order)
            order[index:index] = moved
            begun = next((at for at, one in enumerate(order) if states[one.id] not in _PLACED), len(order))
            order[begun:] = sorted(order[begun:], key=lambda one: states[one.id] not in ALIVE)
            rows = [(position, other.id) for position, other in enumerate(order, start=1)]
            connection.executemany("UPDATE jobs SET place = ? WHERE id = ?", rows)

    def assign(self, job: str, gpus: tuple[str, ...]) -> None:
        """Have a job that does not run take these GPUs, by UUID, or any where none is named.

        Raises ConfigError where it runs, computes on the CPU, or takes another number of GPUs.
        """
        known, gpus = {gpu.uuid for gpu in self.gpus()}, tuple(dict.fromkeys(gpus))  # one twice is one
        with self._changing() as connection:
            one = _named(database.jobs(connection), job)
            if self._seen(one).state in ALIVE:
                raise ConfigError(f"{label(one)} runs", where="queue", remedy="stop it first")
            if one.gpus == (CPU,):
                remedy = "add it again where GPUs are, without --on cpu and TRAINER_PROFILE=cpu"
                raise ConfigError(f"{label(one)} computes on the CPU", where="queue", remedy=remedy)
            if gpus and len(gpus) != one.count:
                what = f"{label(one)} takes {one.count}, and {len(gpus)} are named"
                remedy = f"name {one.count}, or add its configuration again with another parallel.gpus"
                raise ConfigError(what, where="GPUs", remedy=remedy)
            if not known.issuperset(gpus):
                remedy = f"GPUs that are there: {', '.join(sorted(known)) or 'none'}"
                what = f"{', '.join(sorted(set(gpus) - known))} is not there"
                raise ConfigError(what, where="GPUs", remedy=remedy)
            connection.execute("UPDATE jobs SET gpus = ? WHERE id = ?", (json.dumps(gpus), one.id))

    def forget(self, job: str) -> None:
        """Take a job off the list, with its configuration and its output; its run folder stays.

        Raises ConfigError for one that runs.
        """
        self.submit((), in_place_of=[job])

    def _take_off(self, connection: sqlite3.Connection, job: str) -> int:
        one = _named(database.jobs(connection), job)
        if self._seen(one).state in ALIVE:
            raise ConfigError(f"{label(one)} runs", where="queue", remedy="stop it first")
        connection.execute("DELETE FROM leases WHERE job = ?", (one.id,))
        connection.execute("DELETE FROM jobs WHERE id = ?", (one.id,))
        return one.id

    def start_due(self) -> list[Job]:
        """Give back the GPUs of runs that ended, and start the jobs whose turn it is; gives these.

        Raises StorageError or ConfigError as the database does, OSError where no process can be started.
        """
        self.children[:] = [child for child in self.children if child.poll() is None]  # no zombies
        with contextlib.ExitStack() as held:
            # a watcher has its own descriptor of the lock; where none was started, the job waits again
            due = self._taken(held)
            for start in due:
                self.launch(start)
        return [start.job for start in due]

    def _taken(self, held: contextlib.ExitStack) -> list[Start]:
        """Leases and locks of the jobs whose turn it is, taken in one transaction; `held` closes locks."""
        known = self.gpus()
        with self._changing() as connection:
            waiting: list[Job] = []
            taken = self.in_use(known)
            busy: set[Path] = set()
            for job in database.jobs(connection):
                seen = self._seen(job)
                if seen.state in ALIVE:
                    taken |= dict.fromkeys(job.leases, holder(job))
                    busy.add(job.run)
                    continue
                if job.leases:
                    connection.execute("DELETE FROM leases WHERE job = ?", (job.id,))
                if seen.state is State.WAITING:
                    job = self._count_start(connection, job) if seen.exit_code is not None else job
                    waiting.append(job)
            free_folders = [one for one in waiting if one.run not in busy and not run_is_held(one.run)]
            found = turns(free_folders, [gpu.uuid for gpu in known], taken, {})
            due: list[Start] = []
            for job in free_folders:
                gpus = found[job.id].gpus
                if not gpus or job.run in busy:
                    continue
                lock = jobfiles.take_lock(jobfiles.job_folder(self.folder, job.id))
                if lock is None:
                    continue
                held.callback(os.close, lock)
                connection.executemany("INSERT INTO leases VALUES (?, ?)", [(one, job.id) for one in gpus])
                busy.add(job.run)
                due.append(Start(job=job, gpus=gpus, lock=lock))
            return due

    def launch(self, start: Start) -> None:
        """Start a job's watcher in a session of its own: no terminal and no end of the queue reaches it.

        It is recorded before: a watcher that does not even come up is not started for ever. A job whose own
        files cannot be read fails, and keeps no other job from its turn.
        """
        folder = jobfiles.job_folder(self.folder.absolute(), start.job.id)
        watched = (str(folder), str(start.job.start), str(start.lock), str(start.job.working_folder))
        config = str(folder / jobfiles.CONFIG_FILE)
        try:
            draws = jobfiles.pictures(folder) is not None
        except StorageError as error:
            jobfiles.fail(folder, start.job.start, error)
            return
        command = (*self.drawing, config, f"--try={start.job.run}") if draws else (*self.command, config)
        jobfiles.write_began(folder, start.job.start)
        try:
            with (folder / jobfiles.OUTPUT_FILE).open("ab") as output, kept_back():
                child = subprocess.Popen(
                    python("-m", "trainer.queue.watcher", *watched, *command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd="/",
                    env=self.environment_of(start),
                    start_new_session=True,
                    pass_fds=(start.lock,),
                )
        except OSError:  # no process was made: the job waits again
            jobfiles.withdraw_began(folder)
            raise
        self.children.append(child)

    def environment_of(self, start: Start) -> dict[str, str]:
        """The environment of a run: this process's, without what would change its configuration."""
        kept = {
            name: value
            for name, value in environment.with_absolute_paths(environment.without_settings()).items()
            if name not in launchers.VARIABLES
        }
        queue = self.folder.absolute()
        return {
            **kept,
            environment.DEVICE_ORDER: environment.BY_SLOT,
            VISIBLE: "" if start.gpus == (CPU,) else ",".join(start.gpus),
            "TRAINER_RUNTIME_DIR": str(jobfiles.job_folder(queue, start.job.id) / jobfiles.RUNTIME),
            "TRAINER_METRICS_PORT": "0",
            "TRAINER_QUEUE_DIR": str(queue),
            "TRAINER_QUEUE_JOB": str(start.job.id),
        }

    def _count_start(self, connection: sqlite3.Connection, job: Job) -> Job:
        """The job, whose next start counts from now on."""
        connection.execute("UPDATE jobs SET start = start + 1 WHERE id = ?", (job.id,))
        return dataclasses.replace(job, start=job.start + 1)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            what = f"the queue's folder cannot be made: {error.strerror}"
            remedy = "set TRAINER_QUEUE_DIR to a folder that this user can write"
            raise ConfigError(what, where=str(self.folder), remedy=remedy) from error
        with database.transaction(self.folder, self.machine()) as connection:
            yield connection


def users_queue() -> Local:
    """The queue of this user and machine, in TRAINER_QUEUE_DIR."""
    return Local(folder=environment.queue_dir().absolute(), gpus=usable_gpus)


def _named(jobs: Sequence[Job], job: str) -> Job:
    found = next((one for one in jobs if str(one.id) == job), None)
    if found is None:
        raise ConfigError(f"there is no job {job}", where="queue", remedy="`trainer queue list` shows them")
    return found


def holder(job: Job) -> str:
    """Words for who has a GPU: `held by cats (job 3)`."""
    return f"held by {label(job)}"


def run_is_held(run: Path) -> bool:
    """True if a run trains in this folder, whoever started it."""
    return locks.is_held(run / rundir.LOCK_FILE) is True
