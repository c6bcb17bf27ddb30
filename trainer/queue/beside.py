"""Runs that are started beside the queue: they keep off GPUs that a job of it has."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config import environment
from trainer.errors import HardwareError, Problem
from trainer.queue import database, jobfiles
from trainer.queue.turns import label


def require_unleased(uuids: Sequence[str]) -> None:
    """Raise HardwareError where a job of this user's queue runs on one of these GPUs.

    The queue's own runs have the number of their job in TRAINER_QUEUE_JOB.
    """
    folder, own = environment.queue_dir(), environment.read("TRAINER_QUEUE_JOB")
    problems = [
        Problem(
            what=f"{', '.join(shared)} is leased to {label(job)} of the queue",
            where=str(folder),
            remedy="`trainer queue add` waits for it; CUDA_VISIBLE_DEVICES takes another GPU; --share-gpu"
            " starts beside that job",
        )
        for job in database.read_jobs(folder)
        if str(job.id) != own
        and (shared := [uuid for uuid in uuids if uuid in job.leases])
        and jobfiles.is_alive(jobfiles.job_folder(folder, job.id))
    ]
    if problems:
        raise HardwareError(problems)
