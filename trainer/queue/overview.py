"""The queue as people look at it: each job's state, why it waits, how far it is and when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.errors import StorageError
from trainer.machine.occupancy import GpuUse
from trainer.queue import jobfiles
from trainer.queue.database import Job
from trainer.queue.launcher import ALIVE, CPU, Seen, State
from trainer.queue.local import Local, holder, run_is_held
from trainer.queue.turns import Due, about, starts, turns
from trainer.telemetry import status
from trainer.telemetry.status import Phase

_PREPARATION = frozenset({Phase.LOAD, Phase.CACHE, Phase.FIRST_STEP})
"""Phases before the time of a step is known."""

_WORDS_OF_TRIES = {
    State.STOPPING: "ends",
    State.HELD: "`trainer queue hold --release` draws it",
    State.LOST: "it was killed, or the machine was; `trainer queue hold --release` draws it anew",
}
"""Words of a job that draws, where those of a run would speak of its checkpoints."""


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
    prepares: bool = False
    """Whether a running job does not train yet: it loads its base, encodes, or compiles."""
    seconds_left: float | None = None
    """Time that a running job trains until it ends, about; None where nobody knows. Of one that prepares
    that is its plan's, which has no time for that.
    """
    due: Due | None = None
    """When a waiting job starts; None where nobody knows."""
    why: str = ""
    """Why a waiting job does not start yet; empty where it is about to."""
    pictures: int | None = None
    """Pictures that it draws; None where it trains."""
    trouble: str = ""
    """Why its own files cannot be read; empty where they can."""

    @property
    def note(self) -> str:
        """The job's kind, where it does not train, and the rest of the state in words."""
        return ", ".join(filter(None, (self._draws, self._rest, self.trouble)))

    @property
    def _draws(self) -> str:
        if self.pictures is None:
            return ""
        return f"makes {self.pictures} {'sample' if self.pictures == 1 else 'samples'}"

    @property
    def _rest(self) -> str:
        if self.pictures is not None and self.seen.state in _WORDS_OF_TRIES:
            return _WORDS_OF_TRIES[self.seen.state]
        if self.seen.state is State.WAITING:
            when = f"starts in {self.due.words}" if self.why and self.due is not None else ""
            return ", ".join(filter(None, (self.why, when, self.seen.words)))
        return ", ".join(filter(None, (self.seen.words, self.left)))

    @property
    def left(self) -> str:
        """The time until a running job ends in words, empty where nobody knows: `about 40 min left`."""
        if self.prepares:
            training = "" if self.seconds_left is None else f", then {about(self.seconds_left)} of training"
            return f"preparing{training}"
        return "" if self.seconds_left is None else f"{about(self.seconds_left)} left"


def overview(queue: Local, known: Sequence[GpuUse] | None = None) -> list[Entry]:
    """All jobs in their order, on the GPUs that are `known`, else asked for. Changes nothing, and needs no
    process that starts jobs.
    """
    jobs, known = queue.jobs(), queue.gpus() if known is None else known
    names = {gpu.uuid: f"GPU {gpu.index}" for gpu in known} | {CPU: "the CPU"}
    running = [(job, _running(queue, job, seen, names)) for job, seen in jobs if seen.state in ALIVE]
    taken = queue.in_use(known)
    remaining: dict[str, float | None] = dict.fromkeys(taken)
    for job, entry in running:
        taken |= dict.fromkeys(job.leases, ", ".join(filter(None, (holder(job), entry.left))))
        remaining |= dict.fromkeys(job.leases, entry.seconds_left)
    busy = {job.run for job, _ in running}
    waiting, blocked = list[Job](), dict[int, str]()
    for job in (job for job, seen in jobs if seen.state is State.WAITING):
        if job.run in busy or run_is_held(job.run):
            blocked[job.id] = "waits for another run that trains in its folder"
        else:
            waiting.append(job)
    found = turns(waiting, [gpu.uuid for gpu in known], taken, names)
    waits = {job: one.why for job, one in found.items()} | blocked
    prepared = {uuid for job, entry in running if entry.prepares for uuid in job.leases}
    due = starts(waiting, [gpu.uuid for gpu in known], remaining, prepared)
    entries = {job.id: entry for job, entry in running}
    return [
        entries.get(job.id) or _resting(queue, job, seen, names, waits.get(job.id, ""), due.get(job.id))
        for job, seen in jobs
    ]


def _resting(
    queue: Local, job: Job, seen: Seen, names: Mapping[str, str], why: str, due: Due | None
) -> Entry:
    """The entry of a job that does not run."""
    pictures, trouble = _pictures(queue, job)
    return Entry(
        job=job,
        seen=seen,
        gpus=_words(job, names),
        why=why,
        due=due,
        pictures=pictures,
        trouble=trouble,
    )


def _running(queue: Local, job: Job, seen: Seen, names: Mapping[str, str]) -> Entry:
    beat = status.read_status(jobfiles.job_folder(queue.folder, job.id) / jobfiles.RUNTIME)
    step, total = (None, None) if beat is None else (beat.optimizer_step, beat.optimizer_steps)
    trains = seen.state is State.RUNNING  # one that saves ends without the steps that are left
    left, (pictures, trouble) = job.seconds if trains else None, _pictures(queue, job)
    if trains and beat is not None and step is not None and total is not None and beat.median_step_seconds:
        left = (total - step) * beat.median_step_seconds
    return Entry(
        job=job,
        seen=seen,
        gpus=_words(job, names),
        step=step,
        total=total,
        prepares=pictures is None
        and seen.state is State.RUNNING
        and (beat is None or beat.phase in _PREPARATION),
        seconds_left=left,
        pictures=pictures,
        trouble=trouble,
    )


def _pictures(queue: Local, job: Job) -> tuple[int | None, str]:
    """The pictures that a job draws, None where it trains, and why they cannot be read."""
    try:
        return jobfiles.pictures(jobfiles.job_folder(queue.folder, job.id)), ""
    except StorageError as error:
        return None, str(error)


def _words(job: Job, names: Mapping[str, str]) -> str:
    gpus = job.leases or job.gpus
    if not gpus:
        return "any GPU" if job.count == 1 else f"any {job.count} GPUs"
    return ", ".join(names.get(uuid, uuid) for uuid in gpus)
