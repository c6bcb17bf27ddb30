"""Losses of several runs by step as one PNG, with matplotlib (extra `plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.errors import ConfigError
from trainer.files import atomic
from trainer.telemetry.runs import Run, labels
from trainer.words import extras

COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#57606a", "#1b7c83")


def write_curves(runs: Sequence[Run], path: Path) -> None:
    """Lines are training losses, dots held-out ones, a colour a run; at least one run must have a loss.

    Raises ConfigError without matplotlib, NoSpaceError.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed", where="--plot", remedy=extras.remedy("plots")
        ) from error

    # a dollar sign in a folder's name is no formula
    with matplotlib.rc_context({"text.parse_math": False}):
        layout = ConstrainedLayoutEngine(h_pad=0.15, w_pad=0.15)
        figure = Figure(figsize=(12, 7.2 + 0.26 * len(runs)), dpi=100, layout=layout)
        axes = figure.subplots()
        axes.set_title("Losses by step: training as lines, held-out samples as dots", loc="left", fontsize=14)
        for number, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
            colour = COLOURS[number % len(COLOURS)]
            steps, losses = zip(*run.losses, strict=True) if run.losses else ((), ())
            # no label begins with a folder's name: matplotlib leaves those with an underscore out
            name = f"loss and held-out loss of {label}" if run.held_out else f"loss of {label}"
            axes.plot(steps, losses, color=colour, linewidth=2, label=name)
            for point in run.held_out:
                axes.plot(*point, "o", color=colour, markersize=10, markeredgecolor="white", clip_on=False)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="step", ylabel="loss")
        axes.grid(axis="y", color="#d1d9e0")
        figure.legend(loc="outside lower left", frameon=False)
        with atomic.writing(path) as file:
            figure.savefig(file, format="png", metadata={"Software": None})
