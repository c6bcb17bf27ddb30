"""Runs that the queue may not have started: a stop by the run folder, and GPUs of runs beside the queue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trainer.config import environment
from trainer.errors import HardwareError, Problem, StorageError
from trainer.files import atomic
from trainer.queue import database, jobfiles
from trainer.queue.database import Job
from trainer.queue.launcher import ALIVE
from trainer.queue.local import users_queue
from trainer.queue.turns import label
from trainer.telemetry import control, locks
from trainer.telemetry.control import Order


def stop_run(run: Path) -> control.Request:
    """Ask the run in this folder to save and end: by its job, which is held then and may load still, where
    one of this user's queue runs there, else as `control.ask` does.

    Raises ConfigError where nothing runs there, StorageError.
    """
    queue = users_queue()
    # of a job that cannot be looked up its watcher has it held, once it has stopped
    with contextlib.suppress(StorageError):
        for job, seen in queue.jobs():
            if seen.state in ALIVE and job.run.resolve() == run.resolve():
                queue.stop(str(job.id))
                return control.put(jobfiles.job_folder(queue.folder, job.id) / jobfiles.RUNTIME, Order.STOP)
    return control.ask(run, Order.STOP)


@contextlib.contextmanager
def kept_from_queue(uuids: Sequence[str], *, share: bool, tell: Callable[[str], None]) -> Iterator[None]:
    """Keep these GPUs from jobs of this user's queue that are not started yet, for as long as the block runs.

    Raises HardwareError where a job of it has one of them, unless `share`. The queue's own runs have the
    number of their job in TRAINER_QUEUE_JOB. A queue that cannot be used does not stop a run: `tell` is told.
    """
    folder = environment.queue_dir()
    with contextlib.ExitStack() as held:
        try:
            with atomic.reading_told(folder):
                there = (folder / database.DATABASE_FILE).is_file()
            if there:
                # in a transaction no scheduler takes a lease between the look and the lock
                with database.transaction(folder, None) as connection:
                    if not share:
                        _require_unleased(folder, database.jobs(connection), uuids)
                    for uuid in filter(None, uuids):
                        held.enter_context(locks.sharing(jobfiles.gpu_lock(folder, uuid)))
        except (StorageError, OSError) as error:
            tell(f"warning: jobs of the queue are not kept off this run's GPUs: {error}")
        yield


def require_free(uuids: Sequence[str]) -> None:
    """Raise HardwareError where a job of this user's queue has one of these GPUs. A queue that cannot be used
    is told later, by `kept_from_queue`.
    """
    folder = environment.queue_dir()
    with contextlib.suppress(StorageError):
        _require_unleased(folder, database.read_jobs(folder), uuids)


def _require_unleased(folder: Path, jobs: Sequence[Job], uuids: Sequence[str]) -> None:
    own = environment.read("TRAINER_QUEUE_JOB")
    problems = [
        Problem(
            what=f"{', '.join(shared)} is leased to {label(job)} of the queue",
            where=str(folder),
            remedy="`trainer queue add` waits for it; CUDA_VISIBLE_DEVICES takes another GPU; --share-gpu"
            " starts beside that job",
        )
        for job in jobs
        if str(job.id) != own
        and (shared := [uuid for uuid in uuids if uuid in job.leases])
        and jobfiles.is_alive(jobfiles.job_folder(folder, job.id))
    ]
    if problems:
        raise HardwareError(problems)
