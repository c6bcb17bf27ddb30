"""Plots of the records with matplotlib: times of a step, peak memory beside time, losses. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.page import curves_name, plot_names, plotted, scaled, scaling_name
from bench.record import Record, Row
from trainer.files import atomic
from trainer.telemetry.measurement import Curves, Table

_OURS, _OTHERS, _FLOOR = "#0969da", "#8c959f", "#cf222e"
_COLOURS = ("#0969da", "#bf3989", "#1a7f37", "#9a6700", "#8250df", "#cf222e", "#57606a")
_MARKERS = "os^DvPX"
_HEADROOM = 1.06
"""Room on the axes beyond the largest value, so that no dot lies on the frame."""


def write_plots(records: Mapping[str, Record | Table], folder: Path) -> None:
    """Two PNGs for each record that has something to compare, one of losses where it has them, one of steps
    of several GPUs.
    """
    for stem, record in records.items():
        figures: dict[str, Any] = {}
        if isinstance(record, Record) and plotted(record):
            figures = dict(zip(plot_names(stem), (bars(record), scatter(record)), strict=True))
        elif isinstance(record, Table) and record.curves is not None:
            figures = {curves_name(stem): lines(record.title, record.curves)}
        elif isinstance(record, Table) and scaled(record):
            figures = {scaling_name(stem): scaling(record)}
        for name, figure in figures.items():
            folder.mkdir(parents=True, exist_ok=True)
            with atomic.writing(folder / name) as file:
                # without the version of matplotlib: a picture changes where what it shows does
                figure.savefig(file, format="png", dpi=100, metadata={"Software": None})


def bars(record: Record) -> Any:
    """A bar a row, in groups by family; the floor is a red line across the bar."""
    rows = [row for row in record.rows if row.milliseconds is not None]
    families = list(dict.fromkeys(row.family for row in rows))
    ticks: dict[float, str] = {}
    place = 0.0
    figure = _figure(1.8 + 0.36 * (len(rows) + 1.5 * len(families)))
    axes = figure.subplots()
    for family in families:
        group = [row for row in rows if row.family == family]
        ticks[place] = family
        for number, row in enumerate(group, start=1):
            ticks[place + number] = _label(row, group)
            colour = _OURS if row.variant.startswith("ours") else _OTHERS
            bar = axes.barh(place + number, row.milliseconds, height=0.75, color=colour)
            memory = "" if row.allocated_gib is None else f", {row.allocated_gib:.1f} GiB"
            axes.bar_label(bar, [f"{row.milliseconds:,.0f} ms{memory}"], padding=5)
            if row.floor_milliseconds:
                ends = (place + number - 0.45, place + number + 0.45)
                axes.plot([row.floor_milliseconds] * 2, ends, color=_FLOOR, linewidth=2)
        place += len(group) + 1.5
    axes.set_title(f"{record.title}: milliseconds a step", loc="left", fontsize=14)
    axes.set(xlabel="milliseconds a step", ylim=(place - 1, -0.6))
    axes.set_xlim(0, 1.2 * max(row.milliseconds or 0.0 for row in rows))
    axes.set_yticks(list(ticks), list(ticks.values()))
    for text in axes.get_yticklabels():
        text.set_fontweight("bold" if text.get_text() in families else "normal")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    ours = [row.variant.startswith("ours") for row in rows]
    keys: list[Any] = [Patch(color=_OURS, label="ours")] if any(ours) else []
    keys += [] if all(ours) else [Patch(color=_OTHERS, label="as others write it")]
    if any(row.floor_milliseconds for row in rows):
        keys.append(Line2D([], [], color=_FLOOR, linewidth=2, label="floor: the products alone"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    return figure


def lines(title: str, curves: Curves) -> Any:
    """A line a run: losses upwards, steps to the right; the first one is wide, and the others lie over it."""
    figure = _figure(6.5)
    axes = figure.subplots()
    axes.set_title(f"{title}: losses", loc="left", fontsize=14)
    axes.set(xlabel="step", ylabel=f"loss, mean of {curves.steps} steps")
    axes.grid(color="#d1d9e0")
    for number, (name, losses) in enumerate(curves.losses.items()):
        ends = [curves.steps * (place + 1) for place in range(len(losses))]
        width = 1.5 if number else 5.0
        colour = _COLOURS[number % len(_COLOURS)] if number else _OTHERS
        axes.plot(ends, losses, label=name, color=colour, linewidth=width)
    figure.legend(loc="outside lower center", ncols=min(3, len(curves.losses)), frameon=False)
    return figure


def scaling(record: Table) -> Any:
    """GPUs to the right, upwards how many times one GPU's work they do in its time, where each has a
    micro-batch a step; a line a family, variant and way, dashed what equal steps would give.
    """
    known: dict[str, dict[int, float]] = {}
    for cells in record.rows:
        row = dict(zip(record.columns, cells, strict=True))
        if row["of one"]:
            name = " ".join((row["family"], row["variant"].removeprefix("ours-"), row["way"]))
            known.setdefault(name, {})[int(row["GPUs"])] = int(row["GPUs"]) / float(row["of one"])
    several = {name: points for name, points in known.items() if max(points) > 1}
    most = max(max(points) for points in several.values())
    figure = _figure(6.5)
    axes = figure.subplots()
    axes.set_title(f"{record.title}: work in one GPU's time", loc="left", fontsize=14)
    axes.set(xlabel="GPUs", ylabel="times the work of one GPU", xticks=range(1, most + 1))
    axes.grid(color="#d1d9e0")
    axes.plot([1, most], [1, most], color=_OTHERS, linestyle="--", label="equal steps")
    for number, (name, points) in enumerate(several.items()):
        counts, colour = sorted({1: 1.0, **points}.items()), _COLOURS[number % len(_COLOURS)]
        axes.plot(
            *zip(*counts, strict=True), label=name, color=colour, marker=_MARKERS[number % len(_MARKERS)]
        )
    figure.legend(loc="outside lower center", ncols=min(3, len(several) + 1), frameon=False)
    return figure


def _figure(height: float) -> Any:
    return Figure(figsize=(12, height), layout=ConstrainedLayoutEngine(h_pad=0.15, w_pad=0.15))


def _label(row: Row, group: list[Row]) -> str:
    """The variant, with its settings where others have the same name; cut to what fits beside a bar."""
    if [one.variant for one in group].count(row.variant) == 1:
        return row.variant
    text = f"{row.variant}: {row.settings}"
    return text if len(text) <= 48 else text[:45] + "..."


def scatter(record: Record) -> Any:
    """Peak memory to the right, time upwards; a colour a family, or a variant of one; ours filled."""
    rows = [row for row in record.rows if row.milliseconds is not None and row.allocated_gib is not None]
    families = list(dict.fromkeys(row.family for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows))
    figure = _figure(6.5)
    axes = figure.subplots()
    axes.set_title(f"{record.title}: peak memory and time of a step", loc="left", fontsize=14)
    axes.set(xlabel="peak GiB allocated", ylabel="milliseconds a step")
    axes.grid(color="#d1d9e0")
    for row in rows:
        several = len(families) > 1
        number = families.index(row.family) if several else variants.index(row.variant)
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(
            row.allocated_gib,
            row.milliseconds,
            linestyle="none",
            marker=_MARKERS[variants.index(row.variant) % len(_MARKERS)],
            markersize=11,
            color=colour,
            markerfacecolor=colour if row.variant.startswith("ours") else "none",
            markeredgewidth=2.5,
            label=f"{row.family} {row.variant}" if several else row.variant,
        )
    if rows:
        axes.set_xlim(0, _HEADROOM * max(row.allocated_gib or 0.0 for row in rows))
        axes.set_ylim(0, _HEADROOM * max(row.milliseconds or 0.0 for row in rows))
        figure.legend(loc="outside right upper", frameon=False)
    return figure
