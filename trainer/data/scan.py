"""Floor 4: image sets as records, with every problem of every set found before anything is loaded."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from trainer.data.buckets import buckets, nearest_bucket
from trainer.data.captions import METADATA_NAME, Metadata, read_metadata, read_sidecar, with_trigger_word
from trainer.data.images import measure, read_bytes
from trainer.data.listing import Listing, list_folder
from trainer.data.records import ImageRecord
from trainer.errors import DataError, Problem

if TYPE_CHECKING:
    from trainer.config.schema import ImageSet

MAX_PROBLEMS_SHOWN = 50
MIN_SIDE_PIXELS = 16
MAX_IMAGE_ASPECT = 3.0
"""Beyond this, the squarest cut of 2:1 would throw away more than a third of the picture."""

# Decoders release the GIL. Few threads, because each holds a whole decoded picture.
_MAX_THREADS = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Captioned:
    """An image file with its caption, not yet opened."""

    set_index: int
    repeats: int
    path: Path
    caption: str


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What opening an image gave: size in pixels and the hash of the file."""

    width: int
    height: int
    content_sha256: str


def scan_images(
    sets: Sequence[ImageSet],
    *,
    resolution: int,
    multiple: int,
    trigger_word: str | None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ImageRecord, ...]:
    """Records of all images of all sets, in order of set and file name, each decoded to its last byte.

    `progress(done, total)` runs in the calling thread, once per image, and may raise to stop. Raises one
    DataError with all problems of all sets.
    """
    sizes = buckets(resolution, multiple)
    problems: list[Problem] = []
    found: list[_Captioned] = []
    for set_index, image_set in enumerate(sets):
        listing = list_folder(image_set.img_dir)
        problems += listing.problems
        captions, caption_problems = _captions(listing)
        problems += caption_problems
        found += [
            _Captioned(
                set_index=set_index, repeats=image_set.repeats, path=path, caption=captions.get(path, "")
            )
            for path in listing.images
        ]
    records: list[ImageRecord] = []
    for done, (item, measured) in enumerate(_measure_all(found), start=1):
        if isinstance(measured, _Measured):
            records.append(_record(item, measured, sizes, trigger_word))
        else:
            problems += measured
        if progress is not None:
            progress(done, len(found))
    if problems:
        raise DataError(_capped(problems))
    _tell_enlarged(records)
    return tuple(records)


def _captions(listing: Listing) -> tuple[dict[Path, str], list[Problem]]:
    """The caption of every image that has exactly one, and a problem for every other one."""
    metadata, problems = read_metadata(listing.metadata) if listing.metadata else (Metadata(), [])
    sidecars = {path.stem: path for path in listing.captions}
    captions: dict[Path, str] = {}
    for image in listing.images:
        sidecar = sidecars.get(image.stem)
        if sidecar is not None and image.name in metadata.named:
            what = f"the image has a caption in {sidecar.name} and in {metadata.named[image.name]}"
            problems.append(Problem(what=what, where=str(image), remedy="remove one of them"))
        elif sidecar is not None:
            try:
                captions[image] = read_sidecar(sidecar)
            except DataError as error:
                problems += error.problems
        elif image.name in metadata.rows:
            captions[image] = metadata.rows[image.name]
        elif image.name not in metadata.named and f"{image.stem}.txt" not in listing.names:
            problems.append(_no_caption(image, listing.metadata))
    images = {image.name for image in listing.images}
    for name, where in metadata.named.items():
        if name not in images:
            what = "is not an image that can be read" if name in listing.names else "is not in the folder"
            problems.append(
                Problem(what=f"{name} {what}", where=where, remedy="correct the name, or remove the line")
            )
    return captions, problems


def _no_caption(image: Path, metadata: Path | None) -> Problem:
    """An image without a caption, and where one could go."""
    if metadata is None:
        remedy = f"write {image.stem}.txt beside it, or name it in a {METADATA_NAME}"
        return Problem(what="the image has no caption", where=str(image), remedy=remedy)
    remedy = f"add a line for it, or write {image.stem}.txt beside it"
    return Problem(what=f"the image is not named in {METADATA_NAME}", where=str(image), remedy=remedy)


def _measure_all(items: Sequence[_Captioned]) -> Iterator[tuple[_Captioned, _Measured | list[Problem]]]:
    """Open all images in a few threads; results come in order."""
    executor = ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        # Pillow warns from 89 million pixels on and refuses at twice that; large photos are no reason to warn
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield from zip(items, executor.map(_measured, [item.path for item in items]), strict=True)
    finally:
        executor.shutdown(cancel_futures=True)


def _measured(path: Path) -> _Measured | list[Problem]:
    """Size and hash of one image, or what is wrong with it."""
    try:
        data = read_bytes(path)
        width, height = measure(data, str(path))
    except DataError as error:
        return list(error.problems)
    size = f"the picture has {width}x{height} pixels"
    if min(width, height) < MIN_SIDE_PIXELS:
        what, remedy = f"{size}, less than {MIN_SIDE_PIXELS} on a side", "use a larger picture, or remove it"
        return [Problem(what=what, where=str(path), remedy=remedy)]
    if max(width, height) > MAX_IMAGE_ASPECT * min(width, height):
        what = f"{size}, more than {MAX_IMAGE_ASPECT:g} times as long as wide"
        return [Problem(what=what, where=str(path), remedy="crop it to what matters, or remove it")]
    return _Measured(width=width, height=height, content_sha256=hashlib.sha256(data).hexdigest())


def _record(
    item: _Captioned, measured: _Measured, sizes: Sequence[tuple[int, int]], trigger_word: str | None
) -> ImageRecord:
    """One finished record."""
    bucket_width, bucket_height = nearest_bucket(measured.width, measured.height, sizes)
    return ImageRecord(
        path=item.path,
        identifier=f"{item.set_index}/{item.path.name}",
        caption=with_trigger_word(item.caption, trigger_word),
        width=measured.width,
        height=measured.height,
        bucket_width=bucket_width,
        bucket_height=bucket_height,
        repeats=item.repeats,
        content_sha256=measured.content_sha256,
    )


def _capped(problems: Sequence[Problem]) -> list[Problem]:
    """The first problems, and how many more there are."""
    shown = list(problems[:MAX_PROBLEMS_SHOWN])
    hidden = len(problems) - len(shown)
    if hidden:
        remedy = "correct those above, then run again to see the rest"
        shown.append(Problem(what=f"... and {hidden} more problems", remedy=remedy))
    return shown


def _tell_enlarged(records: Sequence[ImageRecord]) -> None:
    """Warn once when images are smaller than what they are trained at: they are blurred by that."""
    small = [
        record
        for record in records
        if record.width * record.height < record.bucket_width * record.bucket_height
    ]
    if small:
        least = min(small, key=lambda record: (record.width * record.height, record.identifier))
        _log.warning(
            "%d of %d images have fewer pixels than they are trained at and are enlarged; the smallest is %s "
            "with %dx%d. A smaller data.resolution, or larger images, would be sharper.",
            len(small), len(records), least.path, least.width, least.height,
        )  # fmt: skip
