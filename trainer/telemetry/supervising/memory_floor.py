"""The decision that a run on unified memory must save and end: a pure function of the memory left over time.

Such a machine locks up where its memory ends, so a run that takes ever more must be saved before. Two floors
do that for slow leaks only: with 4 GiB between them and a save of a minute, for less than 0.05 GiB/s. So a
run that has trained for a while, keeps setting new lows and would come near the hard floor before a save
could end is asked to at once.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.words.sizes import GIB


@dataclass(frozen=True, kw_only=True)
class Floors:
    """Limits on the memory that is left, at which the supervisor acts."""

    soft_floor_bytes: int = 10 * GIB
    """Below it for `soft_samples` looks in a row, the child is asked to save and end."""
    soft_samples: int = 5
    hard_floor_bytes: int = 6 * GIB
    """Below it the child is killed at once, before the whole host locks up."""
    trend_below_bytes: int = 20 * GIB
    """The rate at which memory goes counts only below this, the memory that a plan leaves free here."""
    trend_seconds: tuple[float, ...] = (8.0, 20.0, 60.0)
    """Lengths of windows of which `trend_windows` in a row must set new lows: a ramp that ends within one is
    no trend. The shortest is for fast leaks, the longest for those in steps."""
    trend_windows: int = 3
    trend_after_seconds: float = 60.0
    """Seconds of training before a trend counts: peaks that come and go within them set no lows later."""
    trend_memory_seconds: float = 600.0
    """Seconds after which samples are forgotten."""
    trend_reach: float = 3.0
    """Factor on a trend's observed length for which it is believed, for `save_seconds` at most."""
    save_seconds: float = 75.0
    """Time to end a micro-batch and to save."""
    save_bytes: int = 2 * GIB
    """Bytes that a trend must leave above the hard floor meanwhile: saving takes memory too."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at the memory that is left."""

    at: float
    """Seconds of a clock that never goes back."""
    available: int
    """Bytes that could be had without swapping, page cache that can be dropped among them: MemAvailable."""
    trained: bool
    """Whether the run had trained by then: before, there is nothing to save and loading looks like a leak."""


class Action(enum.Enum):
    """An order to the training process."""

    KEEP = enum.auto()
    ASK = enum.auto()
    KILL = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An order, and the reason unless it is to keep on."""

    action: Action
    reason: str = ""


def decide(samples: Sequence[Sample], floors: Floors) -> Decision:
    """Judge the newest of `samples`, at least one in the order of their times, by those before it."""
    available = samples[-1].available
    left, hard = f"{_gib(available)} of host memory are left", _gib(floors.hard_floor_bytes)
    if available < floors.hard_floor_bytes:
        why = f"killed before the host locks up: {left}, the hard floor is {hard}"
        return Decision(action=Action.KILL, reason=why)
    latest = [sample.available for sample in samples[-floors.soft_samples :]]
    if len(latest) == floors.soft_samples and max(latest) < floors.soft_floor_bytes:
        why = f"{left}, the soft floor is {_gib(floors.soft_floor_bytes)}: the run saves and ends"
        return Decision(action=Action.ASK, reason=why)
    rate = _too_fast(samples, floors)
    if rate > 0:
        a_minute = _gib(60 * rate)
        why = f"{left}, {a_minute} less every minute, the hard floor is {hard}: the run saves and ends"
        return Decision(action=Action.ASK, reason=why)
    return Decision(action=Action.KEEP)


def remember(samples: Sequence[Sample], newest: Sample, floors: Floors) -> tuple[Sample, ...]:
    """`samples` and the newest, without those that no decision needs any more."""
    since = newest.at - floors.trend_memory_seconds
    old = bisect.bisect_left(samples, since, key=lambda sample: sample.at)
    spared = max(0, len(samples) + 1 - floors.soft_samples)
    return (*samples[min(old, spared) :], newest)


def _too_fast(samples: Sequence[Sample], floors: Floors) -> float:
    """Bytes a second that go too fast for a save to end well above the hard floor; 0 where they do not."""
    available = samples[-1].available
    if available >= floors.trend_below_bytes:
        return 0.0
    trained = [sample for sample in samples if sample.trained]
    # slower ones are the soft floor's, which has the patience for short dips
    spare = max(floors.save_bytes, available - floors.hard_floor_bytes - floors.save_bytes)
    times = [sample.at for sample in trained]
    lows = list(itertools.accumulate((sample.available for sample in trained), min))
    for seconds in floors.trend_seconds:
        seen = seconds * floors.trend_windows
        if not times or times[-1] - times[0] < max(seen, floors.trend_after_seconds):
            continue
        rate = _slowest_fall(times, lows, seconds, floors.trend_windows)
        if rate * min(floors.trend_reach * seen, floors.save_seconds) > spare:
            return rate
    return 0.0


def _slowest_fall(times: Sequence[float], lows: Sequence[int], seconds: float, windows: int) -> float:
    """Bytes a second by which the record low fell, in that of the last windows where it fell least.

    A burst or a saw's tooth sets a record once, and a jump in one window only: neither is a trend.
    """
    ends = [bisect.bisect_right(times, times[-1] - number * seconds) - 1 for number in range(windows + 1)]
    falls = [lows[before] - lows[after] for after, before in itertools.pairwise(ends)]
    return min(falls) / seconds


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
