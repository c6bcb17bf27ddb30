"""A simulated host with unified memory: what runs leave of it by the second, and what the supervisor decides.

Sizes are in GiB and times in seconds; everything follows from a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from trainer.telemetry.supervising.memory_floor import Action, Floors, Sample, decide, remember

TOTAL, SYSTEM = 121.7, 5.0
WEDGE = 2.0
"""Available memory at which the machine locks up."""
# the kernel keeps some memory free, and does not count all of the page cache as available
_FREE, _WATERMARK = 0.3, 0.1
_CACHED_A_SECOND = 1.5
_LOAD = 40.0
Curve = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Memory left without page cache, over time, and the course of that run's save."""

    kind: str
    left: Curve
    trained_at: float
    """Time at which the first step is done."""
    end: float
    save_seconds: float
    """Seconds from the request to the finished checkpoint, the rest of the micro-batch included."""
    save_size: float
    """Memory that saving takes in addition."""

    def rows(self, at: float, *, saving: bool = False) -> dict[str, int]:
        """Rows of /proc/meminfo, in kB: page cache fills free memory, and no row has the GPU's memory."""
        left = max(0.0, self.left(at) - (self.save_size if saving else 0.0)) + _WATERMARK
        cached = max(0.0, min(left - _FREE, _CACHED_A_SECOND * at))
        sizes = {
            "MemTotal": TOTAL,
            "MemFree": left - cached,
            "MemAvailable": left - min(cached / 2, _WATERMARK),
            "Buffers": 0.0,
            "Cached": cached,
            "AnonPages": SYSTEM,
        }
        return {name: int(size * 1024**2) for name, size in sizes.items()}

    def meminfo(self, at: float) -> str:
        """The file itself."""
        return "".join(f"{name + ':':15} {size:8d} kB\n" for name, size in self.rows(at).items())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run: `saved`, `killed`, `wedged`, or `kept` to the end of its timeline."""

    how: str
    at: float
    left: float
    why: str = ""


def play(timeline: Timeline, floors: Floors, seed: int, *, row: str = "MemAvailable") -> Outcome:
    """Look at a row of meminfo once a second, more or less, and decide as the supervisor does."""
    chance = random.Random(seed)
    now, asked_at, why = 0.0, math.inf, ""
    samples: tuple[Sample, ...] = ()
    while now < timeline.end:
        rows = timeline.rows(now, saving=now > asked_at)
        left = rows["MemAvailable"] / 1024**2
        if left < WEDGE:
            return Outcome(how="wedged", at=now, left=left, why=why)
        if now >= asked_at + timeline.save_seconds:
            return Outcome(how="saved", at=now, left=left, why=why)
        newest = Sample(at=now, available=rows[row] * 1024, trained=now >= timeline.trained_at)
        samples = remember(samples, newest, floors)
        decision = decide(samples, floors)
        if decision.action is Action.KILL:
            return Outcome(how="killed", at=now, left=left, why=decision.reason)
        if decision.action is Action.ASK and asked_at == math.inf:
            asked_at, why = now, decision.reason
        now += chance.uniform(0.8, 1.3)
        if now < asked_at + timeline.save_seconds < now + 1:  # so that its end is seen when it comes
            now = asked_at + timeline.save_seconds
    return Outcome(how="kept", at=now, left=timeline.left(now), why=why)


def collapse(seed: int) -> Timeline:
    """A run that takes ever more until nothing is left, no faster than it could be saved."""
    chance = random.Random(seed)
    save = chance.uniform(5, 60)
    kind = ("leak", "steps", "jumps", "bursts", "saw")[seed % 5]
    # from what a plan leaves free to the hard floor in the time of a save and as much as a trend needs
    rate = chance.uniform(0.15, 1.0) * 11.0 / (save + 25)
    # training begins well or close above the soft floor
    begin = chance.uniform(22, 45)
    start = chance.uniform(100, 300)
    taken = _COLLAPSES[kind](chance, rate)
    noise = _noise(chance, 0.1)

    def left(at: float) -> float:
        return _loaded(at, begin) - taken(max(0.0, at - start)) + noise(at)

    return Timeline(
        kind=kind,
        left=left,
        trained_at=_LOAD + 20,
        end=20_000,
        save_seconds=save,
        save_size=chance.uniform(0, 1),
    )


def healthy(seed: int) -> Timeline:
    """A run that goes on for half an hour and comes close to the soft floor, but keeps above it."""
    chance = random.Random(seed)
    kind = tuple(_HEALTHY)[seed % len(_HEALTHY)]
    # what is left at the worst moment, dips aside
    worst = chance.uniform(10.4, 13)
    above, noise = _HEALTHY[kind](chance), _noise(chance, 0.1)

    def left(at: float) -> float:
        return _loaded(at, worst + above(at)) + noise(at)

    return Timeline(kind=kind, left=left, trained_at=_LOAD + 20, end=1800, save_seconds=60, save_size=1)


def _loaded(at: float, steady: float) -> float:
    """Loading takes memory at a gigabyte or two a second, which looks like a leak until it is done."""
    return steady + (TOTAL - SYSTEM - steady) * max(0.0, 1 - at / _LOAD)


def _noise(chance: random.Random, size: float) -> Curve:
    waves = [(chance.uniform(2, 200), chance.uniform(0, 6.3)) for _ in range(5)]
    return lambda at: size * sum(math.sin(6.2832 * at / length + shift) for length, shift in waves) / 5


def _leak(chance: random.Random, rate: float) -> Curve:
    return lambda at: rate * at


def _steps(chance: random.Random, rate: float) -> Curve:
    period = min(chance.uniform(8, 40), 2.5 / rate)
    return lambda at: rate * period * math.floor(at / period)


def _jumps(chance: random.Random, rate: float) -> Curve:
    """A slow leak, and more at each validation or checkpoint, of which some stays."""
    period, size, slow = chance.uniform(90, 240), chance.uniform(0.5, 2), min(rate, 0.04) * chance.random()
    return lambda at: slow * at + size * math.floor(at / period)


def _bursts(chance: random.Random, rate: float) -> Curve:
    """A leak under what comes and goes."""
    period, length, size = chance.uniform(30, 90), chance.uniform(3, 15), chance.uniform(0.5, 2)
    return lambda at: rate * at + (size if at % period < length else 0.0)


def _saw(chance: random.Random, rate: float) -> Curve:
    period, size = chance.uniform(4, 40), chance.uniform(0.5, 2)
    return lambda at: rate * at + size * (at % period) / period


_COLLAPSES = {"leak": _leak, "steps": _steps, "jumps": _jumps, "bursts": _bursts, "saw": _saw}


def _steady(chance: random.Random) -> Curve:
    """Close above the floor all the time."""
    return lambda at: 0.0


def _dips(chance: random.Random) -> Curve:
    """Below the soft floor for up to three seconds, as when something large is handed over."""
    period, length, depth = chance.uniform(40, 200), chance.uniform(1, 3), chance.uniform(0.5, 3.5)
    return lambda at: -depth if at > 70 and at % period < length else 0.5


def _files(chance: random.Random) -> Curve:
    """Big files are read and written: pages that wait for the disk cannot be dropped for a while."""
    period, length, size = chance.uniform(60, 300), chance.uniform(10, 40), chance.uniform(1, 5)
    ramp = chance.uniform(1, 8)
    return lambda at: size * (1 - min(1.0, (at % period) / ramp) * (at % period < length))


def _tooth(chance: random.Random) -> Curve:
    period, size = chance.uniform(4, 55), chance.uniform(1, 6)
    return lambda at: size * (1 - (at % period) / period)


def _previews(chance: random.Random) -> Curve:
    """A decoder and its activations come at each validation and go after it, some larger than others."""
    period, length = chance.uniform(60, 300), chance.uniform(10, 60)
    sizes = [chance.uniform(1, 6) for _ in range(8)]

    def above(at: float) -> float:
        place = at % period
        ramp = min(1.0, place / 4) if place < length else 0.0
        return 6 - sizes[int(at / period) % len(sizes)] * ramp

    return above


def _warming(chance: random.Random) -> Curve:
    """The first batches of every size take what later ones use again."""
    span, size = chance.uniform(120, 400), chance.uniform(0.2, 0.4)
    places = sorted(span * chance.random() ** 2 for _ in range(10))
    return lambda at: size * sum(at < 60 + place for place in places)


def _neighbour(chance: random.Random) -> Curve:
    """Another process of the host grows over minutes and ends."""
    period, size = chance.uniform(400, 900), chance.uniform(2, 8)
    return lambda at: size * (1 - (at % period) / period)


_HEALTHY = {
    "steady": _steady,
    "dips": _dips,
    "files": _files,
    "tooth": _tooth,
    "previews": _previews,
    "warming": _warming,
    "neighbour": _neighbour,
}
