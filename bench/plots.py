"""Plots of the records with Pillow: bars of the time of a step, and peak memory against time. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from bench.labels import Box, place
from bench.page import plot_names, plotted
from bench.record import Record, Row, Table
from trainer.engine.results.pictures import write_png

_INK, _GREY, _LINE = "#1f2328", "#59636e", "#d1d9e0"
_OURS, _OTHERS, _FLOOR = "#0969da", "#8c959f", "#cf222e"
_FAMILY_COLOURS = ("#0969da", "#bf3989", "#1a7f37", "#9a6700", "#8250df", "#cf222e", "#57606a")
_WIDTH, _MARGIN, _LABEL_WIDTH, _VALUE_WIDTH = 1200, 24, 330, 170
_BAR, _GAP, _GROUP_GAP, _TEXT, _TITLE = 24, 8, 22, 16, 22
_SCATTER_HEIGHT, _TICKS, _DOT = 700, 5, 7
_LABEL_HEIGHT = _TEXT + 4
"""From the top that Pillow is given to below the lowest letters."""
_HEADROOM = 1.04
"""Of the axes, so that no dot lies on the frame."""


def write_plots(records: Mapping[str, Record | Table], folder: Path) -> list[Path]:
    """Two PNGs for each record that has something to compare; gives their paths."""
    written = []
    for stem, record in records.items():
        if isinstance(record, Record) and plotted(record):
            for name, picture in zip(plot_names(stem), (bars(record), scatter(record)), strict=True):
                write_png(picture, folder / name)
                written.append(folder / name)
    return written


def bars(record: Record) -> Image.Image:
    """A bar a row, in groups by family; the floor is a red line across the bar."""
    rows = [row for row in record.rows if row.milliseconds is not None]
    families = list(dict.fromkeys(row.family for row in rows))
    height = 2 * _MARGIN + _TITLE + _GROUP_GAP + len(rows) * (_BAR + _GAP)
    height += len(families) * (_TEXT + _GAP + _GROUP_GAP)
    picture = Image.new("RGB", (_WIDTH, height), "white")
    draw = ImageDraw.Draw(picture)
    title, text = ImageFont.load_default(size=_TITLE), ImageFont.load_default(size=_TEXT)
    draw.text((_MARGIN, _MARGIN), f"{record.title}: milliseconds a step", fill=_INK, font=title)
    left, right = _MARGIN + _LABEL_WIDTH, _WIDTH - _MARGIN - _VALUE_WIDTH
    scale = (right - left) / max(row.milliseconds or 0.0 for row in rows)
    top = _MARGIN + _TITLE + _GROUP_GAP
    for family in families:
        draw.text((_MARGIN, top), family, fill=_INK, font=text)
        top += _TEXT + _GAP
        group = [row for row in rows if row.family == family]
        variants = [row.variant for row in group]
        for row in group:
            alone = variants.count(row.variant) == 1
            label = row.variant if alone else f"{row.variant}: {row.settings}"
            _bar(draw, row, _fitting(label, text), (left, top), scale, text)
            top += _BAR + _GAP
        top += _GROUP_GAP
    return picture


def _bar(
    draw: ImageDraw.ImageDraw,
    row: Row,
    label: str,
    corner: tuple[int, int],
    scale: float,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    left, top = corner
    assert row.milliseconds is not None
    end = left + round(row.milliseconds * scale)
    middle = top + (_BAR - _TEXT) // 2 - 2
    draw.text((_MARGIN + 16, middle), label, fill=_GREY, font=font)
    draw.rectangle((left, top, end, top + _BAR), fill=_OURS if row.variant.startswith("ours") else _OTHERS)
    if row.floor_milliseconds:
        floor = left + round(row.floor_milliseconds * scale)
        draw.line((floor, top - 2, floor, top + _BAR + 2), fill=_FLOOR, width=2)
    memory = "" if row.allocated_gib is None else f", {row.allocated_gib:.1f} GiB"
    draw.text((end + _GAP, middle), f"{row.milliseconds:,.0f} ms{memory}", fill=_INK, font=font)


def _fitting(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """What fits beside a bar."""
    space = _LABEL_WIDTH - 32
    if font.getlength(text) <= space:
        return text
    return next(
        text[:n] + "..." for n in range(len(text), 0, -1) if font.getlength(text[:n] + "...") <= space
    )


def scatter(record: Record) -> Image.Image:
    """Peak memory to the right, time upwards; a colour a family, ours filled, the others open."""
    rows = [row for row in record.rows if row.milliseconds is not None and row.allocated_gib is not None]
    families = list(dict.fromkeys(row.family for row in rows))
    picture = Image.new("RGB", (_WIDTH, _SCATTER_HEIGHT), "white")
    draw = ImageDraw.Draw(picture)
    title, text = ImageFont.load_default(size=_TITLE), ImageFont.load_default(size=_TEXT)
    heading = f"{record.title}: peak GiB (right) against milliseconds a step (up)"
    draw.text((_MARGIN, _MARGIN), heading, fill=_INK, font=title)
    if not rows:
        return picture
    box = (_MARGIN + 70, _MARGIN + 2 * _TITLE, _WIDTH - _MARGIN - 60, _SCATTER_HEIGHT - _MARGIN - 2 * _TEXT)
    most_x = _nice(_HEADROOM * max(row.allocated_gib or 0.0 for row in rows))
    most_y = _nice(_HEADROOM * max(row.milliseconds or 0.0 for row in rows))
    _axes(draw, box, (most_x, most_y), text)
    places = [
        (
            box[0] + (box[2] - box[0]) * (row.allocated_gib or 0.0) / most_x,
            box[3] - (box[3] - box[1]) * (row.milliseconds or 0.0) / most_y,
        )
        for row in rows
    ]
    names = [row.variant if len(families) == 1 else f"{row.family} {row.variant}" for row in rows]
    sizes = [(text.getlength(name), _LABEL_HEIGHT) for name in names]
    labels = place(places, sizes, _DOT, Box(*box))
    for row, name, (x, y), label in zip(rows, names, places, labels, strict=True):
        colour = _FAMILY_COLOURS[families.index(row.family) % len(_FAMILY_COLOURS)]
        fill = colour if row.variant.startswith("ours") else "white"
        draw.ellipse((x - _DOT, y - _DOT, x + _DOT, y + _DOT), fill=fill, outline=colour, width=3)
        draw.text((label.left, label.top), name, fill=_GREY, font=text)
    return picture


def _axes(
    draw: ImageDraw.ImageDraw,
    box: Sequence[int],
    most: tuple[float, float],
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    left, top, right, bottom = box
    for tick in range(_TICKS + 1):
        share = tick / _TICKS
        x, y = left + (right - left) * share, bottom - (bottom - top) * share
        draw.line((left, y, right, y), fill=_LINE)
        draw.line((x, top, x, bottom), fill=_LINE)
        draw.text((x - 10, bottom + _GAP), f"{most[0] * share:g}", fill=_GREY, font=font)
        label = f"{most[1] * share:g}"
        draw.text((left - _GAP - font.getlength(label), y - _TEXT // 2), label, fill=_GREY, font=font)


def _nice(value: float) -> float:
    """The next number at or above `value` whose fifths are short."""
    step = 1.0
    while True:
        for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8):
            if value <= factor * step * _TICKS:
                return factor * step * _TICKS
        step *= 10
