"""Whose turn it is: which jobs may start now on which GPUs, why the others wait, and about when they start.

Nobody is overtaken on a GPU that is wanted: a job that cannot start yet keeps those that it wants from later
ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainer.queue.database import Job
from trainer.queue.launcher import CPU
from trainer.words.plurals import numbered


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The answer for one waiting job."""

    gpus: tuple[str, ...] = ()
    """UUIDs on which it may start now; empty where it waits."""
    why: str = ""
    """Why it waits."""


@dataclass(frozen=True, kw_only=True)
class Due:
    """When a waiting job starts, about."""

    seconds: float
    at_the_earliest: bool = False
    """Whether it is later by the time that runs before it prepare, which no plan has."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that it has then, about."""

    @property
    def words(self) -> str:
        """`about 40 min`, `about 40 min at the earliest`."""
        return about(self.seconds) + (" at the earliest" if self.at_the_earliest else "")


def turns(
    waiting: Sequence[Job], gpus: Sequence[str], taken: Mapping[str, str], names: Mapping[str, str]
) -> dict[int, Turn]:
    """A turn for each of the jobs, which are in their order.

    gpus: UUIDs of the machine's GPUs, in their order. taken: UUID -> who has it, in words. names: UUID -> its
    name for people.
    """
    found: dict[int, Turn] = {}
    free = [uuid for uuid in (*gpus, CPU) if uuid not in taken]
    wanted: dict[str, str] = {}
    for job in waiting:
        reserved = job.gpus or tuple(uuid for uuid in gpus if uuid in free)
        chosen = reserved if job.gpus else reserved[: job.count]
        if len(chosen) >= job.count and set(chosen) <= set(free):
            found[job.id] = Turn(gpus=chosen)
            reserved = told = chosen
        else:
            told = job.gpus or tuple(gpus)
            reasons = _reasons(told, [*gpus, CPU], {**wanted, **taken}, names)
            short = "" if job.gpus else _short(job.count, len(gpus))
            found[job.id] = Turn(why=short or f"waits for {reasons}")
            if short:  # it blocks nobody
                continue
        wanted = {**{uuid: f"wanted before by {label(job)}" for uuid in told}, **wanted}
        free = [uuid for uuid in free if uuid not in reserved]
    return found


def label(job: Job) -> str:
    """A job's name for people: `cats (job 3)`."""
    return f"{job.name} (job {job.id})"


def _short(count: int, there: int) -> str:
    return (
        f"wants {numbered(count, 'GPU')}, and {numbered(there, 'is', 'are')} there" if count > there else ""
    )


def _reasons(
    wanted: Sequence[str], there: Sequence[str], taken: Mapping[str, str], names: Mapping[str, str]
) -> str:
    """The GPUs that are not to be had, each with who has it."""
    told = []
    for uuid in wanted:
        if uuid not in there:
            told.append(f"{names.get(uuid, uuid)}, which is not there")
        elif uuid in taken:
            told.append(f"{names.get(uuid, uuid)}, {taken[uuid]}")
    return "; ".join(told)


def starts(
    waiting: Sequence[Job],
    gpus: Sequence[str],
    remaining: Mapping[str, float | None],
    preparing: Collection[str] = (),
) -> dict[int, Due | None]:
    """When each of the jobs starts; None where that depends on a time that nobody knows.

    remaining: UUID -> seconds until it is free, of those that are taken; None where unknown, as of another
    program. preparing: UUIDs whose run does not train yet. Jobs are in their order, and train for as long as
    their plans predict.
    """
    free_in = {uuid: _known(remaining.get(uuid, 0.0)) for uuid in (*gpus, CPU)}
    later = set(preparing)
    found: dict[int, Due | None] = {}
    for job in waiting:
        wanted = job.gpus or tuple(gpus)
        if len(wanted) < job.count:  # it blocks nobody
            found[job.id] = None
            continue
        times = sorted(free_in.get(uuid, math.inf) for uuid in wanted)
        start = times[job.count - 1]
        free = [uuid for uuid in wanted if free_in.get(uuid, math.inf) <= start]
        earliest = not later.isdisjoint(free)
        # until it starts, GPUs that are free are kept from later jobs, and then it takes the first
        taken = tuple(free[: job.count])
        due = Due(seconds=start, at_the_earliest=earliest, gpus=taken)
        found[job.id] = None if math.isinf(start) else due
        free_in |= dict.fromkeys(free, start) | dict.fromkeys(taken, start + _known(job.seconds))
        later |= {*taken, *(free if earliest else ())}
    return found


def _known(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def about(seconds: float) -> str:
    """A time in words, with one or two digits: `about 40 min`."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h" if seconds < 36 * 3600 else f"about {seconds / 86400:.1f} days"
