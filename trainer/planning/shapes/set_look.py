"""A data set at a glance: its samples by their names, and some pictures' sizes.

No file is checked, no picture decoded: the run tells which cannot be read.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path

from trainer.config.schema import DataSet
from trainer.data.pictures.buckets import Size, buckets, nearest_bucket
from trainer.data.sets.controls import read_set, set_folders
from trainer.families.family import Family
from trainer.files.component_shapes import Stamp, stamp_of
from trainer.planning.shapes.mix import Pictures

_MOST_LOOKED_AT = 200
"""Samples of a set that are looked at for their shapes."""
_MOST_COUNTED = 20_000
"""Files and folders of a set that are counted; a larger set is not listed twice for one row."""

Sample = tuple[Path, ...]
"""A picture and its control images."""
Sets = tuple[DataSet, ...]


Seen = tuple[tuple[Size, ...], float, int]
"""A sample that was looked at: the sizes of its picture and its control images in pixels, how many samples of
the set it stands for, and how often each of these comes in an epoch.
"""


def samples(sets: Sets, family: Family) -> tuple[tuple[Sample, ...], ...] | None:
    """The samples of each set; None where the sets are no folders of this disk that are counted at once."""
    return _samples(sets, family.control_counts, stamp(sets))


def seen(sets: Sets, family: Family) -> tuple[Seen, ...]:
    """Some samples of each set; empty where the samples of one, or all of their sizes, are not known."""
    return _seen(sets, family.control_counts, stamp(sets))


def shapes_of(looked: Sequence[Seen], resolution: int, multiple: int) -> Pictures:
    """The shapes that samples come in at this resolution, and how many samples have each.

    Control images are counted as if they came into buckets too.
    """
    if not looked or resolution < multiple:
        return ()
    sizes = buckets(resolution, multiple)
    numbers: dict[tuple[Size, ...], int] = {}
    weights: dict[tuple[int, int], float] = {}
    for pictures, weight, repeats in looked:
        shape = tuple(nearest_bucket(*size, sizes) for size in pictures)
        key = numbers.setdefault(shape, len(numbers)), repeats
        weights[key] = weights.get(key, 0.0) + weight
    return tuple((shape, max(1, round(weight)), repeats) for (shape, repeats), weight in weights.items())


def stamp(sets: Sets) -> Stamp:
    """The folders as they are now: what is remembered of others is of no use."""
    folders = (folder for one in sets for folder in set_folders(one))
    # pathlib's exists() raises for a folder that may not be entered
    return stamp_of(folder for folder in folders if os.path.exists(folder))  # noqa: PTH110


@functools.lru_cache(maxsize=8)
def _samples(sets: Sets, controls: tuple[int, int], stamp: Stamp) -> tuple[tuple[Sample, ...], ...] | None:
    found = []
    for one in sets:
        if one.img_dir is None or not _is_small(one.img_dir):
            return None
        apart = [folder for other in sets for folder in set_folders(other) if folder != one.img_dir]
        listing, _, _, pairs = read_set(one, one.img_dir, apart, controls)
        before = pairs.found if controls[1] else {}
        found.append(tuple((path, *before.get(path, ())) for path in listing.images))
    return tuple(found) if all(found) else None


@functools.lru_cache(maxsize=8)
def _seen(sets: Sets, controls: tuple[int, int], stamp: Stamp) -> tuple[Seen, ...]:
    from trainer.data.pictures.images import claimed_size

    found = []
    for one, every in zip(sets, _samples(sets, controls, stamp) or (), strict=False):
        # by chance: names often take turns
        chosen = random.Random(0).sample(range(len(every)), min(len(every), _MOST_LOOKED_AT))
        sizes = [tuple(map(claimed_size, every[number])) for number in sorted(chosen)]
        known = [tuple(size for size in row if size is not None) for row in sizes if row[0] is not None]
        if not known:
            return ()
        weight = len(every) / len(known)
        found += [(row, weight, one.repeats) for row in known]
    return tuple(found)


def _is_small(folder: Path) -> bool:
    """True if a folder of this disk has few enough files to be listed for a row of the plan."""
    entries = itertools.chain.from_iterable((*inside, *files) for _, inside, files in os.walk(folder))
    return sum(1 for _ in itertools.islice(entries, _MOST_COUNTED + 1)) <= _MOST_COUNTED
