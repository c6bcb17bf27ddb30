"""The sizes that images are trained at. Pure integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.errors import ConfigError

Size = tuple[int, int]
"""Width and height in pixels."""

MAX_ASPECT = 2.0
"""Longest side over shortest of any bucket."""


def buckets(resolution: int, multiple: int) -> tuple[Size, ...]:
    """All bucket sizes, narrowest first: sides are multiples of `multiple`, areas up to resolution^2.

    The long side grows in steps of about a sixteenth of `resolution`: finer steps would crop little less, and
    would scatter a data set over so many sizes that batches never fill. Raises ConfigError when nothing fits.
    """
    if resolution < multiple:
        what = f"{resolution} is smaller than {multiple} pixels, the smallest side of this family"
        raise ConfigError(what, where="data.resolution", remedy=f"use {multiple} or more")
    step = multiple * max(1, round(resolution / 16 / multiple))
    long_side = resolution // multiple * multiple
    sizes: set[Size] = set()
    while True:
        # the base side keeps the square even when resolution^2 would allow a longer short side
        short_side = min(resolution * resolution // long_side // multiple * multiple, long_side)
        if short_side == 0 or long_side > MAX_ASPECT * short_side:
            break
        sizes.update({(long_side, short_side), (short_side, long_side)})
        long_side += step
    return tuple(sorted(sizes))


def nearest_bucket(width: int, height: int, sizes: Sequence[Size]) -> Size:
    """The size whose aspect ratio is nearest to width / height by its logarithm; of equals the largest."""
    aspect = math.log(width / height)
    # rounded, so that sizes of one aspect ratio compare equal whatever the last bit of the logarithm is
    ranked = [
        (round(abs(math.log(size[0] / size[1]) - aspect), 9), -size[0] * size[1], size) for size in sizes
    ]
    return min(ranked)[-1]
