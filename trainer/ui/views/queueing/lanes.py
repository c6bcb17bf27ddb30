"""A line for each GPU of the queue: who has it now, and about who comes next, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.machine.occupancy import GpuUse
from trainer.queue.launcher import ALIVE
from trainer.queue.overview import Entry
from trainer.queue.turns import about

_WIDTH = 100.0
_OPEN_SHARE = 0.25
"""Part of the line for a time that nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Stay:
    """The time that one job has a GPU."""

    start: int
    """Place on the line, from 0 to 100."""
    width: int
    words: str
    """`cats, now, about 40 min left`, `dogs, in about 40 min`."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One GPU, and the jobs that have it one after another; all lanes share one scale."""

    name: str
    stays: tuple[Stay, ...]
    free: str
    """When it is free, in words."""

    @property
    def words(self) -> str:
        """All of it in one sentence."""
        return "; ".join([*(stay.words for stay in self.stays), self.free])


@dataclass(frozen=True)
class _Times:
    start: float
    end: float | None
    """Seconds from now; None where nobody knows."""
    words: str


def lanes(entries: Sequence[Entry], gpus: Sequence[GpuUse]) -> tuple[Lane, ...]:
    """A lane for each GPU, where something waits for one; times are those of plans and of steps so far."""
    if not any(entry.due is not None and entry.due.gpus for entry in entries):
        return ()
    by_gpu = {gpu.uuid: sorted(_times(gpu, entries), key=lambda one: one.start) for gpu in gpus}
    known = [time for times in by_gpu.values() for one in times for time in (one.start, one.end or 0.0)]
    scale = _WIDTH * (1 - _OPEN_SHARE) / max([1.0, *known])
    return tuple(_lane(gpu, by_gpu[gpu.uuid], scale) for gpu in gpus)


def _times(gpu: GpuUse, entries: Sequence[Entry]) -> Iterator[_Times]:
    """Stays on one GPU, in no order."""
    held = False
    for entry in entries:
        job, due = entry.job, entry.due
        if entry.seen.state in ALIVE and gpu.uuid in job.leases:
            held = True
            words = f"{job.name}, now{f', {entry.left}' if entry.left else ''}"
            yield _Times(0.0, entry.seconds_left, words)
        elif due is not None and gpu.uuid in due.gpus:
            end = None if job.seconds is None else due.seconds + job.seconds
            begins = f"in {due.words}" if due.seconds else "next"
            yield _Times(due.seconds, end, f"{job.name}, {begins}")
    if gpu.use and not held:
        yield _Times(0.0, None, gpu.use)


def _lane(gpu: GpuUse, times: Sequence[_Times], scale: float) -> Lane:
    stays = []
    for one in times:
        start = min(_WIDTH, one.start * scale)
        width = _WIDTH - start if one.end is None else (one.end - one.start) * scale
        # whole parts of a hundred: the page is not another one every second
        stays.append(Stay(start=round(start), width=max(1, round(width)), words=one.words))
    ends = [one.end for one in times]
    if not ends:
        free = "free"
    elif None in ends:
        free = "nobody knows when it is free"
    else:
        free = f"free in {about(max(end for end in ends if end is not None))}"
    return Lane(name=f"GPU {gpu.index}", stays=tuple(stays), free=free)
