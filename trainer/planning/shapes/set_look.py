"""A data set at a glance: its samples by their names, and some pictures' sizes.

No file is checked, no picture decoded: the run tells which cannot be read.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.config.schema import DataSet
from trainer.data.pictures.buckets import Size, buckets, nearest_bucket
from trainer.data.sets.controls import CONTROL_SIDE, read_set, set_folders
from trainer.data.sets.metadata_files import METADATA_NAMES
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


def samples(sets: Sets, family: Family, *, beside: Sets = ()) -> tuple[tuple[Sample, ...], ...] | None:
    """The samples of each set, without folders of the sets in `beside`; None where the sets are no folders of
    this disk that are counted at once.
    """
    return _samples(sets, beside, family.control_counts, stamp(sets))


def seen(sets: Sets, family: Family, *, beside: Sets = ()) -> tuple[Seen, ...]:
    """Some samples of each set; empty where the samples of one, or all of their sizes, are not known."""
    looked = _seen(sets, beside, family.control_counts, stamp(sets))
    return tuple(itertools.chain.from_iterable(looked)) if all(looked) else ()


def cut(sets: Sets, family: Family, resolution: int, *, beside: Sets = ()) -> tuple[bool | None, ...]:
    """For each set whether a picture of it is cut to its bucket, as one that has the bucket's shape is not;
    None where that is not known.
    """
    looked, multiple = _seen(sets, beside, family.control_counts, stamp(sets)), family.pixel_multiple
    if not looked or resolution < multiple:
        return (None,) * len(sets)
    sizes, found = buckets(resolution, multiple), list[bool | None]()
    for one in looked:
        pictures = {pictures[0] for pictures, _, _ in one}
        some = any(not _fits(size, nearest_bucket(*size, sizes)) for size in pictures)
        all_seen = bool(one) and all(weight == 1.0 for _, weight, _ in one)
        found.append(True if some else False if all_seen else None)
    return tuple(found)


def _fits(picture: Size, bucket: Size) -> bool:
    """Whether nothing of a picture is cut off."""
    return picture[0] * bucket[1] == picture[1] * bucket[0]


def shapes_of(looked: Sequence[Seen], resolution: int, multiple: int) -> Pictures:
    """The shapes that samples come in at this resolution, and how many samples have each.

    Control images are counted as if they came into buckets too, those of another size than their picture's
    into those of 1024 x 1024 pixels.
    """
    if not looked or resolution < multiple:
        return ()
    sizes, others = buckets(resolution, multiple), buckets(CONTROL_SIDE, multiple)
    numbers: dict[tuple[Size, ...], int] = {}
    weights: dict[tuple[int, int], float] = {}
    for pictures, weight, repeats in looked:
        shape = tuple(nearest_bucket(*size, sizes if size == pictures[0] else others) for size in pictures)
        key = numbers.setdefault(shape, len(numbers)), repeats
        weights[key] = weights.get(key, 0.0) + weight
    return tuple((shape, max(1, round(weight)), repeats) for (shape, repeats), weight in weights.items())


def alike(looked: Sequence[Seen]) -> float | None:
    """Share of the control images of an epoch that have their picture's size; None where none was seen."""
    same = every = 0.0
    for (picture, *controls), weight, repeats in looked:
        same += weight * repeats * controls.count(picture)
        every += weight * repeats * len(controls)
    return same / every if every else None


def stamp(sets: Sets) -> Stamp:
    """The folders as they are now, those below them and their metadata: what is remembered of others is of no
    use.
    """
    found = (path for one in sets for folder in set_folders(one) for path in _below(folder))
    # pathlib's exists() raises for a folder that may not be entered
    return stamp_of(path for path in found if os.path.exists(path))  # noqa: PTH110


def _below(folder: Path) -> Iterator[Path]:
    """A folder, with every folder and file of metadata below it; of a large set only with the first ones."""
    waiting, left = [folder], _MOST_COUNTED
    while waiting:
        inside = waiting.pop()
        yield inside
        try:
            with os.scandir(inside) as entries:
                found = list(itertools.islice(entries, left))
        except OSError:  # the run tells of a folder that cannot be read
            continue
        left -= len(found)
        waiting += [Path(entry) for entry in found if entry.is_dir(follow_symlinks=False)]
        yield from (Path(entry) for entry in found if entry.name in METADATA_NAMES)


@functools.lru_cache(maxsize=8)
def _samples(
    sets: Sets, beside: Sets, controls: tuple[int, int], stamp: Stamp
) -> tuple[tuple[Sample, ...], ...] | None:
    found = []
    for one in sets:
        if one.img_dir is None or not _is_small(one.img_dir):
            return None
        others = (*sets, *beside)
        apart = [folder for other in others for folder in set_folders(other) if folder != one.img_dir]
        listing, _, _, pairs = read_set(one, one.img_dir, apart, controls)
        before = pairs.found if controls[1] else {}
        found.append(tuple((path, *before.get(path, ())) for path in listing.images))
    return tuple(found) if all(found) else None


@functools.lru_cache(maxsize=8)
def _seen(sets: Sets, beside: Sets, controls: tuple[int, int], stamp: Stamp) -> tuple[tuple[Seen, ...], ...]:
    """Some samples of each set; none of one whose sizes are not known."""
    from trainer.data.pictures.images import claimed_size

    found = []
    for one, every in zip(sets, _samples(sets, beside, controls, stamp) or (), strict=False):
        # by chance: names often take turns
        chosen = random.Random(0).sample(range(len(every)), min(len(every), _MOST_LOOKED_AT))
        sizes = [tuple(map(claimed_size, every[number])) for number in sorted(chosen)]
        known = [tuple(size for size in row if size is not None) for row in sizes if row[0] is not None]
        weight = len(every) / max(1, len(known))
        found.append(tuple((row, weight, one.repeats) for row in known))
    return tuple(found)


def _is_small(folder: Path) -> bool:
    """True if a folder of this disk has few enough files to be listed for a row of the plan."""
    entries = itertools.chain.from_iterable((*inside, *files) for _, inside, files in os.walk(folder))
    return sum(1 for _ in itertools.islice(entries, _MOST_COUNTED + 1)) <= _MOST_COUNTED
