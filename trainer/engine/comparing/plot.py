"""The picture of a comparison: losses over steps, and below them the time of each step, a strip a variant."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.engine.comparing.rounds import Outcome, Run
from trainer.engine.comparing.variants import Variant
from trainer.errors import ConfigError
from trainer.files import atomic
from trainer.telemetry.curves import COLOURS
from trainer.words import extras

_SPREAD = 0.3
_MARKERS = "o^sDvP"


def write_plot(variants: Sequence[Variant], outcome: Outcome, warmup: int, path: Path) -> None:
    """Write the PNG; a marker a round. Raises ConfigError without matplotlib, NoSpaceError."""
    matplotlib, figure = _figure(len(variants))
    with matplotlib.rc_context({"text.parse_math": False}):
        above, below = figure.subplots(2, 1, height_ratios=(3, 0.7 + 0.5 * len(variants)))
        _draw_losses(above, variants, outcome)
        _draw_times(below, variants, outcome, warmup)
        with atomic.writing(path) as file:
            figure.savefig(file, format="png", metadata={"Software": None})


def require_matplotlib() -> None:
    """Raise ConfigError where the picture could not be drawn after the runs."""
    _figure(1)


def _figure(count: int) -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed", where="--plot", remedy=extras.remedy("plots")
        ) from error
    layout = ConstrainedLayoutEngine(h_pad=0.15, w_pad=0.15)
    return matplotlib, Figure(figsize=(12, 7 + 0.7 * count), dpi=100, layout=layout)


def _draw_losses(axes: Any, variants: Sequence[Variant], outcome: Outcome) -> None:
    """A line a variant, the first one wide below the others; another seed of it in grey."""
    runs = outcome.learned or [run for one in outcome.rounds[:1] for run in one]
    axes.set_title("Losses by step", loc="left", fontsize=14)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(axis="y", color="#d1d9e0")
    if outcome.again is not None:
        label = f"{variants[0].letter} with another seed"
        _line(axes, outcome.again, color="#afb8c1", linewidth=1.2, label=label)
    for run in sorted(runs, key=lambda run: run.variant.letter):
        number = variants.index(run.variant)
        width = 1.5 if number else 3.5
        _line(axes, run, color=COLOURS[number % len(COLOURS)], linewidth=width, label=run.variant.name)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False)


def _line(axes: Any, run: Run, **looks: Any) -> None:
    axes.plot(range(1, len(run.losses) + 1), run.losses, **looks)


def _draw_times(axes: Any, variants: Sequence[Variant], outcome: Outcome, warmup: int) -> None:
    """A dot a timed step, in the strip of its variant from the first step at its upper edge downwards."""
    title = "Milliseconds of each timed step, first ones at the top, a marker a round; the line is the median"
    axes.set_title(title, loc="left", fontsize=14)
    longest = 0.0
    for number, variant in enumerate(variants):
        colour, every = COLOURS[number % len(COLOURS)], list[float]()
        for place, run in enumerate(outcome.timed(variant)):
            times = [1e3 * row["seconds_per_step"] for row in run.rows[warmup:]]
            spread = [
                number - _SPREAD + 2 * _SPREAD * one / max(1, len(times) - 1) for one in range(len(times))
            ]
            marker = _MARKERS[place % len(_MARKERS)]
            axes.plot(times, spread, marker, color=colour, markersize=5, markerfacecolor="none", alpha=0.8)
            every += times
        if every:
            median = statistics.median(every)
            axes.plot([median, median], [number - 0.42, number + 0.42], color=colour, linewidth=2.5, zorder=1)
            longest = max(longest, *every)
    axes.set_yticks(range(len(variants)), [variant.letter for variant in variants])
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.set_xlim(0, 1.05 * longest or 1.0)
    axes.set(xlabel="milliseconds")
    axes.grid(axis="x", color="#d1d9e0")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
