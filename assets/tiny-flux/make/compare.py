"""Find the drawing that a picture is nearest to, and the colour of the sheet that it is on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from make.drawings import COLOURS

SIDE, THUMBNAIL_SIDE = 32, 16
"""Sizes, in pixels, at which pictures are compared."""
_BORDER_PIXELS = 4
Pictures = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class References:
    """Pictures that have a name."""

    names: Sequence[str]
    """One for each picture."""
    pictures: Pictures
    """(N, SIDE, SIDE, 3) in 0..1."""


def pixels(picture: Image.Image) -> Pictures:
    """(H, W, 3) in 0..1."""
    return np.asarray(picture.convert("RGB"), np.float32) / np.float32(255)


def shrink(pictures: Pictures, side: int) -> Pictures:
    """Square pictures (N, S, S, C) to (N, side, side, C), by the mean of every block."""
    block = pictures.shape[1] // side
    parts = pictures.reshape(len(pictures), side, block, side, block, -1)
    smaller: Pictures = parts.mean(axis=(2, 4), dtype=np.float32)
    return smaller


def edges(pictures: Pictures) -> Pictures:
    """(N, S * S): how much each pixel differs from the next, whatever the colours; mean 0, length 1."""
    change = np.zeros(pictures.shape[:3], np.float32)
    change[:, :-1] += np.abs(np.diff(pictures, axis=1)).max(axis=-1)
    change[:, :, :-1] += np.abs(np.diff(pictures, axis=2)).max(axis=-1)
    rows = np.sqrt(change.reshape(len(change), -1))
    rows -= rows.mean(axis=1, keepdims=True)
    lengths: Pictures = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / lengths.clip(min=1e-6)


def nearest(pictures: Pictures, references: Pictures) -> list[int]:
    """For each picture the index of the reference at the least Euclidean distance."""
    ours, theirs = (array.reshape(len(array), -1) for array in (pictures, references))
    distances = (theirs**2).sum(1)[None] - 2 * ours @ theirs.T
    return [int(index) for index in distances.argmin(1)]


def sheet_colour(picture: Pictures) -> str:
    """The colour of COLOURS that is nearest to the median of the picture's border of 4 pixels."""
    inner = np.zeros(picture.shape[:2], bool)
    inner[_BORDER_PIXELS:-_BORDER_PIXELS, _BORDER_PIXELS:-_BORDER_PIXELS] = True
    border = np.median(picture[~inner], axis=0) * 255
    return min(COLOURS, key=lambda colour: float(((border - np.array(COLOURS[colour])) ** 2).sum()))


def uncoloured(name: str) -> str:
    """`heart` of `red-heart`."""
    first, _, rest = name.partition("-")
    return rest if rest and first in (*COLOURS, "blue") else name


def read_training_pictures(data: Path) -> References:
    """Every picture that the transformer learned from, once, at SIDE."""
    paths = [path for part in ("plain", "ink", "coloured") for path in sorted((data / part).glob("*.png"))]
    names = [re.sub(r"-\d\d$", "", path.stem) for path in paths]
    return References(names=names, pictures=_read(paths))


def read_drawings(data: Path, names: Sequence[str], hands: Sequence[str] = ("flat", "ink")) -> References:
    """Drawings of these names on white, at SIDE."""
    paths = [data / "transparent" / hand / f"{name}.png" for hand in hands for name in names]
    return References(names=list(names) * len(hands), pictures=_read(paths))


def _read(paths: Sequence[Path]) -> Pictures:
    small = []
    for path in tqdm(paths, desc="drawings"):
        with Image.open(path) as picture:
            over = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
        small.append(shrink(pixels(over)[None], SIDE)[0])
    return np.stack(small)
