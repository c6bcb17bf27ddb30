"""Pictures of a set with all that a run makes of them, also of those that it would refuse."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.data.pictures.buckets import Size, nearest_bucket
from trainer.data.pictures.images import crop_box
from trainer.data.sets.scan import Captioned, Found


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture, whether it can be used or not. Names are relative to a folder that `look` is told."""

    name: str
    caption: str
    """On one line, without the trigger word; empty where there is none that can be used."""
    caption_from: str
    """File that holds the caption, one of metadata with its row; empty where there is none."""
    problem: str = ""
    """All reasons why a run would refuse it, or leave it out."""
    mask: str = ""
    controls: tuple[str, ...] = ()
    sha256: str = ""
    """Hash of the file's bytes; empty where it was not decoded, or could not be."""
    width: int = 0
    """Pixels after EXIF orientation."""
    height: int = 0
    bucket: Size = (0, 0)
    crop: tuple[float, float, float, float] = (0, 0, 0, 0)
    """Left, top, right and bottom in the picture's pixels of the part in its middle that is trained on."""
    copy_of: str = ""
    """Name of another picture with the same bytes: of the first that has a caption, else of the first."""

    @property
    def in_file(self) -> bool:
        """True if the caption has a .txt of its own, not a row of metadata."""
        return self.caption_from.lower().endswith(".txt")

    @property
    def enlarged(self) -> float:
        """Factor by which the trained part is enlarged for its bucket; below 1 it is made smaller."""
        return self.bucket[0] / (self.crop[2] - self.crop[0]) if self.sha256 else 1.0


def look(
    found: Found, folder: Path, sizes: Sequence[Size]
) -> tuple[tuple[Picture, ...], tuple[tuple[str, str], ...]]:
    """(the pictures in order of set and name, the other files that have a problem, each with it).

    `found` may have been opened or not, `sizes` are the buckets; names are relative to `folder`.
    """
    reasons = dict(found.left_out)
    pictures = tuple(_with_copies(_picture(item, found, reasons, folder, sizes) for item in found.images))
    own = {str(item.path) for item in found.images}
    others = ((os.path.relpath(file, folder), why) for file, why in reasons.items() if file not in own)
    return pictures, tuple(others)


def _picture(
    item: Captioned, found: Found, reasons: dict[str, str], folder: Path, sizes: Sequence[Size]
) -> Picture:
    name, *others = (os.path.relpath(path, folder) for path in (item.path, *item.masks, *item.controls))
    row = Picture(
        name=name,
        caption=item.caption,
        caption_from=os.path.relpath(item.caption_from, folder) if item.caption_from else "",
        problem=reasons.get(str(item.path), ""),
        mask="".join(others[: len(item.masks)]),
        controls=tuple(others[len(item.masks) :]),
    )
    measured = found.good.get(item.path)
    if measured is None:
        return row
    width, height = measured.width, measured.height
    bucket = nearest_bucket(width, height, sizes)
    return dataclasses.replace(
        row,
        sha256=measured.content_sha256,
        width=width,
        height=height,
        bucket=bucket,
        crop=crop_box((width, height), bucket),
    )


def _with_copies(pictures: Iterator[Picture]) -> Iterator[Picture]:
    """The pictures, those of the same bytes but one with its name."""
    rows = list(pictures)
    first: dict[str, str] = {}
    for one in sorted(rows, key=lambda one: not one.caption):
        first.setdefault(one.sha256, one.name)
    for one in rows:
        name = first[one.sha256] if one.sha256 else one.name
        yield one if name == one.name else dataclasses.replace(one, copy_of=name)
