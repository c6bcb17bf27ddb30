"""Figures of measured steps: of one run from its metrics.jsonl, of rounds, and the ratio of two variants'."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.words.sizes import GIB

_DRAWS = 2000


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of the steps of all rounds together."""

    median: float
    fastest: float
    slowest: float
    round_medians: tuple[float, ...]
    steps: int


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The ratio of two medians with its 95 % interval, whose ends are the ratio where it has none."""

    value: float
    low: float
    high: float
    rounds_apart: bool = True
    """Whether the median of every round of one is on the same side of every one of the other."""
    has_interval: bool = True
    """False where every round has one step: nothing is known of how steps vary."""

    @property
    def tells_apart(self) -> bool:
        """True where 1 does not lie in the interval, and no rounds of the two are mixed: steps of one round
        have in common what differs from run to run, which the interval does not know.
        """
        return self.has_interval and self.rounds_apart and not self.low <= 1.0 <= self.high


def summed_up(rounds: Sequence[Sequence[float]]) -> Times:
    """Median and range of milliseconds, a sequence a round; at least one step must be there."""
    times = [time for one in rounds for time in one]
    return Times(
        median=statistics.median(times),
        fastest=min(times),
        slowest=max(times),
        round_medians=tuple(statistics.median(one) for one in rounds if one),
        steps=len(times),
    )


def ratio_of_medians(
    rounds: Sequence[Sequence[float]], base: Sequence[Sequence[float]], *, scale: float = 1.0
) -> Ratio:
    """Median of all steps over that of `base`, times `scale`, with the interval of a bootstrap.

    As many steps are drawn again from each round as it has, so that rounds keep their shares; 2,000 times
    with a fixed seed. Steps of one round are taken to be independent: what all rounds of a variant have in
    common, such as a GPU that got warm, is not in the interval.
    """
    draw = random.Random(0).choices

    def median(of: Sequence[Sequence[float]]) -> float:
        return statistics.median([time for one in of for time in draw(one, k=len(one))])

    ratios = sorted(scale * median(rounds) / median(base) for _ in range(_DRAWS))
    ours, theirs = summed_up(rounds), summed_up(base)
    ones, others = [scale * one for one in ours.round_medians], theirs.round_medians
    return Ratio(
        value=scale * ours.median / theirs.median,
        low=ratios[round(0.025 * _DRAWS)],
        high=ratios[round(0.975 * _DRAWS) - 1],
        rounds_apart=max(ones) < min(others) or min(ones) > max(others),
        has_interval=any(len(one) > 1 for one in [*rounds, *base]),
    )


def of_steps(rows: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Milliseconds of the last `steps` steps, in all and of their passes, and peak memory, from the rows of a
    metrics.jsonl. The steps that one row stands for have its mean.

    Raises ValueError where there are too few, or no row ends where these steps begin.
    """
    trained = [row for row in rows if "seconds_per_step" in row]
    numbers = [row["step"] for row in trained]
    ends = [0, *numbers]
    if ends != sorted(set(ends)) or ends[-1] - steps not in ends:
        raise ValueError(f"the log has lines for steps {numbers}, of which no two are {steps} apart")
    start = ends.index(ends[-1] - steps)
    spans = itertools.pairwise(ends[start:])
    timed = [
        row for row, (begin, end) in zip(trained[start:], spans, strict=True) for _ in range(end - begin)
    ]
    result: dict[str, Any] = {"times": [1e3 * row["seconds_per_step"] for row in timed]}
    computed = [row["compute_seconds_per_step"] for row in timed if "compute_seconds_per_step" in row]
    if computed:  # runs of older versions did not log it
        result["computed"] = [1e3 * seconds for seconds in computed]
    result["loss"] = statistics.fmean(row["loss"] for row in timed)
    peak = max(row.get("device_memory_peak_bytes", 0) for row in trained)
    if peak:
        result["allocated_gib"] = peak / GIB
        # runs of older versions logged what was held at the log steps only
        held = ("device_memory_reserved_peak_bytes", "device_memory_reserved_bytes")
        result["reserved_gib"] = max(row.get(name, 0) for row in trained for name in held) / GIB
    return result
