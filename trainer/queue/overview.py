"""The queue as people look at it: each job's state, why it waits, how far it is and when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.machine.occupancy import GpuUse
from trainer.queue import jobfiles
from trainer.queue.database import Job
from trainer.queue.launcher import ALIVE, CPU, Seen, State
from trainer.queue.local import Local, holder, run_is_held
from trainer.queue.turns import about, starts, turns
from trainer.telemetry import status


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One job at one moment."""

    job: Job
    seen: Seen
    gpus: str
    """GPUs that it has, or wants, in words: `GPU 0, GPU 1`."""
    step: int | None = None
    total: int | None = None
    """Optimizer steps done and planned, of a run that trains."""
    seconds_left: float | None = None
    """Time until a running job ends, about; None where nobody knows."""
    seconds_to_start: float | None = None
    """Time until a waiting job starts, about; None where nobody knows."""
    why: str = ""
    """Why a waiting job does not start yet; empty where it is about to."""
    pictures: int | None = None
    """Pictures that it draws; None where it trains."""

    @property
    def note(self) -> str:
        """The job's kind, where it does not train, and the rest of the state in words."""
        kind = "" if self.pictures is None else f"draws {self.pictures} pictures"
        return ", ".join(filter(None, (kind, self._rest)))

    @property
    def _rest(self) -> str:
        if self.seen.state is State.WAITING:
            known = self.why and self.seconds_to_start is not None
            when = f"starts in {about(self.seconds_to_start or 0.0)}" if known else ""
            return ", ".join(filter(None, (self.why, when, self.seen.words)))
        left = "" if self.seconds_left is None else f"{about(self.seconds_left)} left"
        return ", ".join(filter(None, (self.seen.words, left)))


def overview(queue: Local) -> list[Entry]:
    """All jobs in their order. Changes nothing, and needs no process that starts jobs."""
    jobs, known = queue.jobs(), queue.gpus()
    names = {gpu.uuid: f"GPU {gpu.index}" for gpu in known} | {CPU: "the CPU"}
    running = [(job, _running(queue, job, seen, names)) for job, seen in jobs if seen.state in ALIVE]
    taken = queue.in_use(known)
    remaining: dict[str, float | None] = dict.fromkeys(taken)
    for job, entry in running:
        left = None if entry.seconds_left is None else f", {about(entry.seconds_left)} left"
        taken |= dict.fromkeys(job.leases, holder(job) + (left or ""))
        remaining |= dict.fromkeys(job.leases, entry.seconds_left)
    waiting = [job for job, seen in jobs if seen.state is State.WAITING]
    waits = _waits(waiting, [job for job, _ in running], known, taken, names)
    due = starts(waiting, [gpu.uuid for gpu in known], remaining)
    entries = {job.id: entry for job, entry in running}
    return [
        entries.get(job.id)
        or Entry(
            job=job,
            seen=seen,
            gpus=_words(job, names),
            why=waits.get(job.id, ""),
            seconds_to_start=due.get(job.id),
            pictures=_pictures(queue, job),
        )
        for job, seen in jobs
    ]


def _waits(
    waiting: Sequence[Job],
    running: Sequence[Job],
    known: Sequence[GpuUse],
    taken: Mapping[str, str],
    names: Mapping[str, str],
) -> dict[int, str]:
    """Why each waiting job waits; empty for one that is about to start."""
    busy = {job.run for job in running}
    blocked = {job.id for job in waiting if job.run in busy or run_is_held(job.run)}
    others = [job for job in waiting if job.id not in blocked]
    found = turns(others, [gpu.uuid for gpu in known], taken, names)
    return {job: one.why for job, one in found.items()} | dict.fromkeys(
        blocked, "waits for another run that trains in its folder"
    )


def _running(queue: Local, job: Job, seen: Seen, names: Mapping[str, str]) -> Entry:
    beat = status.read_status(jobfiles.job_folder(queue.folder, job.id) / jobfiles.RUNTIME)
    step, total = (None, None) if beat is None else (beat.optimizer_step, beat.optimizer_steps)
    left = job.seconds
    if beat is not None and step is not None and total is not None and beat.median_step_seconds:
        left = (total - step) * beat.median_step_seconds
    return Entry(
        job=job,
        seen=seen,
        gpus=_words(job, names),
        step=step,
        total=total,
        seconds_left=left,
        pictures=_pictures(queue, job),
    )


def _pictures(queue: Local, job: Job) -> int | None:
    return jobfiles.pictures(jobfiles.job_folder(queue.folder, job.id))


def _words(job: Job, names: Mapping[str, str]) -> str:
    gpus = job.leases or job.gpus
    if not gpus:
        return "any GPU" if job.count == 1 else f"any {job.count} GPUs"
    return ", ".join(names.get(uuid, uuid) for uuid in gpus)
