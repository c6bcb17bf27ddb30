"""Losses of two runs that saw the same samples, side by side. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

LAST = 50
"""Steps at either end whose mean loss is compared."""
_POINTS = 50


def compare(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Means of the first and last steps of a run beside its reference's, and how far single losses are apart.

    Raises ValueError where one has more steps than the other.
    """
    pairs = list(zip(ours, theirs, strict=True))
    apart = [abs(_ratio(one, other) - 1) for one, other in pairs]
    first, last = (
        [statistics.fmean(one[part]) for one in (ours, theirs)] for part in (slice(LAST), slice(-LAST, None))
    )
    return {
        "steps": len(pairs),
        "first_loss_ratio": round(_ratio(*first), 5),
        "last_loss": round(last[0], 5),
        "last_loss_ratio": round(_ratio(*last), 5),
        "mean_apart": round(statistics.fmean(apart), 6),
        "most_apart": round(max(apart), 6),
    }


def _ratio(one: float, other: float) -> float:
    """The quotient; infinite for a loss beside one of 0, to which a few samples learned by heart can fall."""
    return one / other if other else math.inf if one else 1.0


def steps_per_point(steps: int) -> int:
    """Steps that a point of a run's curve is the mean of: fifty points, or one a step of a short run."""
    return max(1, steps // _POINTS)


def curve(losses: Sequence[float], steps: int) -> tuple[float, ...]:
    """Means over so many steps each, the run smoothed; a rest that is shorter is left out."""
    whole = len(losses) // steps * steps
    return tuple(round(statistics.fmean(losses[n : n + steps]), 5) for n in range(0, whole, steps))
