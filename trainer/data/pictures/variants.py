"""The views of an image that are cached and trained on: mirrored, and cut at other places."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.data.records import CENTRED, ImageRecord, Record, View

if TYPE_CHECKING:
    from trainer.config.schema import DataSet

_SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)


def names_a_side(caption: str) -> bool:
    """True if mirroring the image may make its caption wrong."""
    return _SIDES.search(caption) is not None


def with_variants(records: Sequence[Record], sets: Sequence[DataSet]) -> tuple[Record, ...]:
    """The samples with every view that their sets ask for, as samples of their own.

    Sets keep their shares: an epoch is longer by the least common multiple of all counts of views, and what
    has fewer views counts more often in it.
    """
    images = [record for record in records if isinstance(record, ImageRecord)]
    if len(images) < len(records):
        return tuple(records)  # conversations have one view
    found: list[list[View]] = []
    for record in images:
        one = sets[record.set_index]
        flips = (False, True) if one.flip else (False,)
        places = _places(record, one.random_crop)
        found.append([View(place=place, flip=flip) for place in places for flip in flips])
    longer = math.lcm(*(len(views) for views in found))
    seen = []
    for record, views in zip(images, found, strict=True):
        for view in views:
            name = f"{record.identifier}#{view.key}" if view.key else record.identifier
            repeats = record.repeats * (longer // len(views))
            seen.append(dataclasses.replace(record, identifier=name, view=view, repeats=repeats))
    return tuple(seen)


def _places(record: ImageRecord, count: int) -> list[tuple[float, float]]:
    """Places of the `count` cuts, from the image's content alone, so that a cache serves every seed.

    The cut is as large as can be, so that it moves along one axis only; with a count of 0, and where nothing
    is left over, there is the centred one alone.
    """
    wide = record.width * record.bucket_height - record.height * record.bucket_width
    if count == 0 or wide == 0:
        return [CENTRED.place]
    places = []
    for number in range(count):
        digest = hashlib.blake2b(f"{record.content_sha256}/{number}".encode(), digest_size=4).digest()
        shift = round(int.from_bytes(digest, "big") / (2**32 - 1), 6)
        places.append((shift, 0.5) if wide > 0 else (0.5, shift))
    return places
