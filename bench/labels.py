"""Where the names of dots go in a plot: beside them, clear of all dots, of one another and of the frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

_GAP = 4
"""Pixels between a dot and its name, and at least between a name and anything else."""
_LEADING = 2
"""Pixels between a dot and a name above or below it."""
_FARTHEST = 6
"""Lines of text that a name may be from its dot."""


class Box(NamedTuple):
    """Pixels; the top is less than the bottom."""

    left: float
    top: float
    right: float
    bottom: float


def place(
    dots: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], radius: float, frame: Box
) -> list[Box]:
    """One box a dot for its name, whose width and height are in `sizes`.

    Right of the dot is tried first, then left, above, below and farther off; where all of it is taken, the
    place that covers least is chosen.
    """
    circles = [Box(x - radius, y - radius, x + radius, y + radius) for x, y in dots]
    placed: list[Box] = []
    for number, size in enumerate(sizes):
        taken = [*circles[:number], *circles[number + 1 :], *placed]
        found = min(_candidates(circles[number], size, frame), key=lambda one: covered(one, taken, frame))
        placed.append(found)
    return placed


def covered(label: Box, taken: Sequence[Box], frame: Box) -> float:
    """Square pixels of a label that lie on something else or outside the frame; 0 where it is clear."""
    wide = Box(label.left - _GAP, label.top, label.right + _GAP, label.bottom)
    inside = Box(frame.left + _GAP, frame.top + _GAP, frame.right - _GAP, frame.bottom - _GAP)
    outside = (label.right - label.left) * (label.bottom - label.top) - _common(label, inside)
    return outside + sum(_common(wide, other) for other in taken)


def _candidates(dot: Box, size: tuple[float, float], frame: Box) -> Iterator[Box]:
    """The best place first; names above and below are moved sideways into the frame."""
    width, height = size
    x, y = (dot.left + dot.right) / 2, (dot.top + dot.bottom) / 2
    right, left = dot.right + _GAP, dot.left - _GAP - width
    centre = max(frame.left + _GAP, min(x - width / 2, frame.right - _GAP - width))
    for step in range(_FARTHEST):
        above, below = dot.top - _LEADING - (step + 1) * height, dot.bottom + _LEADING + step * height
        corners = [
            (centre, above),
            (centre, below),
            (right, above),
            (left, above),
            (right, below),
            (left, below),
        ]
        if step == 0:
            corners = [(right, y - height / 2), (left, y - height / 2), *corners]
        for corner in corners:
            yield Box(corner[0], corner[1], corner[0] + width, corner[1] + height)


def _common(one: Box, other: Box) -> float:
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    return max(0.0, width) * max(0.0, height)
