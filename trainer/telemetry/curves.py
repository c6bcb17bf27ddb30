"""Losses of several runs by step as one PNG, with Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from trainer.files import atomic
from trainer.telemetry.runs import Run, labels

COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#57606a", "#1b7c83")
_INK, _GREY, _LINE = "#1f2328", "#59636e", "#d1d9e0"
_SIZE = (1200, 720)
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 24, 24, 60
_TEXT, _TICKS, _DOT = 16, 5, 5
_HEADROOM = 1.05
"""Of the axis of losses, so that no line lies on the frame."""


def write_curves(runs: Sequence[Run], path: Path) -> None:
    """Lines are training losses, dots held-out ones, a colour a run. Raises NoSpaceError."""
    picture = draw_curves(runs)
    with atomic.writing(path) as file:
        picture.save(file, format="PNG")


def draw_curves(runs: Sequence[Run]) -> Image.Image:
    """The picture; at least one run must have a loss."""
    points = [point for run in runs for point in (*run.losses, *run.held_out)]
    assert points, "nothing to draw"
    steps = max(1, *(step for step, _ in points)) if len(points) > 1 else max(1, points[0][0])
    top = _HEADROOM * (max(loss for _, loss in points) or 1.0)
    picture = Image.new("RGB", (_SIZE[0], _SIZE[1] + (_TEXT + 10) * len(runs)), "white")
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=_TEXT)
    _axes(draw, font, steps, top)

    def place(point: tuple[int, float]) -> tuple[float, float]:
        x = _LEFT + (_SIZE[0] - _LEFT - _RIGHT) * point[0] / steps
        return x, _SIZE[1] - _BOTTOM - (_SIZE[1] - _TOP - _BOTTOM) * point[1] / top

    for number, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        line = [place(point) for point in run.losses]
        if len(line) > 1:
            draw.line(line, fill=colour, width=2)
        for x, y in (place(point) for point in run.held_out):
            draw.ellipse((x - _DOT, y - _DOT, x + _DOT, y + _DOT), fill=colour, outline="white")
        height = _SIZE[1] + (_TEXT + 10) * number
        draw.rectangle((_LEFT, height + 6, _LEFT + 24, height + 12), fill=colour)
        held_out = ", held-out loss as dots" if run.held_out else ""
        draw.text((_LEFT + 36, height), f"{label}: loss{held_out}", fill=_INK, font=font)
    return picture


def _axes(
    draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, steps: int, top: float
) -> None:
    right, bottom = _SIZE[0] - _RIGHT, _SIZE[1] - _BOTTOM
    for tick in _round_ticks(top):
        y = bottom - (bottom - _TOP) * tick / top
        draw.line((_LEFT, y, right, y), fill=_LINE)
        draw.text((_LEFT - 10, y), f"{tick:.3g}", fill=_GREY, font=font, anchor="rm")
    for tick in _round_ticks(steps):
        x = _LEFT + (right - _LEFT) * tick / steps
        draw.line((x, bottom, x, bottom + 6), fill=_GREY)
        draw.text((x, bottom + 10), f"{tick:g}", fill=_GREY, font=font, anchor="ma")
    draw.rectangle((_LEFT, _TOP, right, bottom), outline=_GREY)
    draw.text(((_LEFT + right) / 2, bottom + 34), "step", fill=_INK, font=font, anchor="ma")
    draw.text((_LEFT, 2), "loss", fill=_INK, font=font)


def _round_ticks(most: float) -> list[float]:
    """0 and multiples of 1, 2 or 5 times a power of ten up to `most`."""
    power = 10.0 ** math.floor(math.log10(most / _TICKS))
    step = next(size * power for size in (1, 2, 5, 10) if size * power * _TICKS >= most)
    return [number * step for number in range(int(most / step) + 1)]
