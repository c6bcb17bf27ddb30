"""Losses of several runs over steps or hours: as numbers, and as lines for pages without scripts."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.telemetry.runs import Run

OVER = ("steps", "hours")
WIDTH, HEIGHT = 640, 260
"""Units of a drawing, which grows with its place."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 8, 24
_MOST_POINTS = 500
_FAR = 20
"""Ratio of values from which on they are drawn by their logarithm."""
_MOST_TICKS = 6
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Losses of one run by step or hour, oldest first."""

    loss: tuple[Point, ...]
    """At most 500 log steps, evenly chosen."""
    held_out: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Curves in WIDTH by HEIGHT units, ready for SVG; each list has one text a run."""

    lines: tuple[str, ...]
    """`x,y x,y ...` of the losses; empty for a run without."""
    dots: tuple[tuple[Point, ...], ...]
    """Centres of the held-out losses."""
    x_ticks: tuple[tuple[float, str], ...]
    """Place and label."""
    y_ticks: tuple[tuple[float, str], ...]


def hours(run: Run) -> list[Point]:
    """(step, hours) at every log step: time of the steps alone, without loading, previews and saving."""
    found, last, total = list[Point](), 0, 0.0
    for step, seconds in run.series("seconds_per_step"):
        total += seconds * max(0, step - last) / 3600
        last = step
        found.append((step, total))
    return found


def curve(run: Run, over: str) -> Curve:
    """The losses of a run over its steps, or over `hours`."""
    chosen = run.losses
    if len(chosen) > _MOST_POINTS:
        last = len(chosen) - 1
        chosen = [chosen[round(place * last / (_MOST_POINTS - 1))] for place in range(_MOST_POINTS)]
    if over != OVER[1]:
        return Curve(loss=tuple(chosen), held_out=tuple(run.held_out))
    times = [(0.0, 0.0), *hours(run)]

    def placed(points: Sequence[Point]) -> tuple[Point, ...]:
        """At the last log step that is not later."""
        keys = [step for step, _ in times]
        return tuple((times[bisect.bisect_right(keys, step) - 1][1], value) for step, value in points)

    return Curve(loss=placed(chosen), held_out=placed(run.held_out))


def aligned(curves: Sequence[Curve]) -> dict[str, list[float] | list[list[float | None]]]:
    """All curves over one axis: `x`, and for each run `loss` and `held_out`, null where it has no value."""
    xs = sorted({x for one in curves for x, _ in (*one.loss, *one.held_out)})
    rows = {"loss": [dict(one.loss) for one in curves], "held_out": [dict(one.held_out) for one in curves]}

    def values(one: dict[float, float]) -> list[float | None]:
        return [one[x] if x in one and math.isfinite(one[x]) else None for x in xs]

    return {"x": xs, **{name: [values(one) for one in found] for name, found in rows.items()}}


def drawing(curves: Sequence[Curve]) -> Drawing | None:
    """The curves as places of a drawing; None where no run has a finite loss."""
    points = [
        (x, y)
        for one in curves
        for x, y in (*one.loss, *one.held_out)
        if math.isfinite(x) and math.isfinite(y)
    ]
    if not points:
        return None
    ys = [y for _, y in points]
    far = is_far(ys)
    low, high = (math.log10(min(ys)), math.log10(max(ys))) if far else (min(0.0, *ys), max(ys))
    right, high = max(x for x, _ in points) or 1.0, high if high > low else low + 1

    def across(x: float) -> float:
        return round(_LEFT + x / right * (WIDTH - _LEFT - _RIGHT), 1)

    def down(y: float) -> float:
        share = ((math.log10(y) if far else y) - low) / (high - low)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)

    def at(some: Sequence[Point]) -> tuple[Point, ...]:
        return tuple((across(x), down(y)) for x, y in some if math.isfinite(y))

    heights = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)] if far else []
    return Drawing(
        lines=tuple(" ".join(f"{x},{y}" for x, y in at(one.loss)) for one in curves),
        dots=tuple(at(one.held_out) for one in curves),
        x_ticks=tuple((across(x), f"{x:g}") for x in ticks(0.0, right)),
        y_ticks=tuple((down(y), f"{y:g}") for y in heights or ticks(min(ys) if far else low, max(ys))),
    )


def is_far(values: Sequence[float]) -> bool:
    """True for values that are drawn by their logarithm: losses fall by orders of magnitude."""
    return min(values) > 0 and max(values) > _FAR * min(values)


def ticks(low: float, high: float) -> list[float]:
    """Round values from `low` to `high`, at most six; one of two equal ones."""
    if high <= low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / _MOST_TICKS))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if (high - low) / (step * factor) <= _MOST_TICKS - 1)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
