"""Compare the shapes that two pictures draw, whatever their colours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE_PIXELS, BORDER_PIXELS = 64, 2
SHEET_DISTANCE = 50.0
"""Greatest distance of a colour that counts as the sheet's; Euclidean, of values 0 to 255."""


def overlap(picture: Image.Image, other: Image.Image) -> float:
    """0 to 1: of what either picture draws, the share that both draw."""
    one, two = _drawn(picture), _drawn(other)
    return float((one & two).sum() / max(1, (one | two).sum()))


def _drawn(picture: Image.Image) -> NDArray[np.bool_]:
    """Mask of the pixels that differ from the border, whatever colour that has."""
    small = picture.convert("RGB").resize((SIDE_PIXELS, SIDE_PIXELS), Image.Resampling.BOX)
    colours = np.asarray(small, dtype=np.float64)
    border = np.ones((SIDE_PIXELS, SIDE_PIXELS), dtype=np.bool_)
    border[BORDER_PIXELS:-BORDER_PIXELS, BORDER_PIXELS:-BORDER_PIXELS] = False
    sheet = np.median(colours[border], axis=0)
    distances: NDArray[np.float64] = np.linalg.norm(colours - sheet, axis=-1)
    return distances >= SHEET_DISTANCE
