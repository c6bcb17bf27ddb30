"""Floor 4: image sets as records, with every problem of every set found before anything is loaded."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from trainer.data.buckets import buckets, nearest_bucket
from trainer.data.captions import METADATA_NAME, Metadata, read_metadata, read_sidecar, with_trigger_word
from trainer.data.controls import control_folders, pair_controls, without_controls
from trainer.data.images import measure, read_bytes
from trainer.data.listing import Listing, list_folder
from trainer.data.records import Control, ImageRecord
from trainer.errors import DataError, Problem

if TYPE_CHECKING:
    from trainer.config.schema import DataSet

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
    controls: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What opening an image gave: size in pixels and the hash of the file."""

    width: int
    height: int
    content_sha256: str


def scan_images(
    sets: Sequence[DataSet],
    *,
    resolution: int,
    multiple: int,
    trigger_word: str | None,
    controls: tuple[int, int] = (0, 0),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ImageRecord, ...]:
    """Records of all images of all sets, in order of set and file name, each decoded to its last byte.

    `controls` are the least and most control images of a sample. `progress(done, total)` runs in the calling
    thread, once per image, and may raise to stop. Raises one DataError with all problems of all sets.
    """
    sizes = buckets(resolution, multiple)
    problems: list[Problem] = []
    found: list[_Captioned] = []
    for set_index, one in enumerate(sets):
        assert one.img_dir is not None, "the configuration was checked"
        found += _list_set(set_index, one, one.img_dir, controls, problems)
    measured = _measure_all((path for item in found for path in (item.path, *item.controls)), progress)
    problems += [problem for one in measured.values() if isinstance(one, list) for problem in one]
    if problems:
        raise DataError(capped(problems))
    good = {path: one for path, one in measured.items() if isinstance(one, _Measured)}
    records = [_record(item, good, sizes, trigger_word) for item in found]
    _tell_enlarged(records)
    return tuple(records)


def measure_controls(paths: Sequence[Path]) -> tuple[Control, ...]:
    """Control images that are named by themselves. Raises one DataError with every problem."""
    measured = _measure_all(paths, None)
    problems = [problem for one in measured.values() if isinstance(one, list) for problem in one]
    if problems:
        raise DataError(capped(problems))
    return tuple(_control(path, one) for path in paths if isinstance(one := measured[path], _Measured))


def _list_set(
    set_index: int, one: DataSet, folder: Path, counts: tuple[int, int], problems: list[Problem]
) -> list[_Captioned]:
    """The images of one set with captions and control images; what is wrong goes to `problems`."""
    listing = list_folder(folder)
    metadata, metadata_problems = read_metadata(listing.metadata) if listing.metadata else (Metadata(), [])
    folders = control_folders(one.control_dir)
    beside, listing = listing, listing if folders else without_controls(listing, metadata)
    pairs = pair_controls(listing, metadata, folders, counts, beside=beside)
    captions, caption_problems = _captions(listing, metadata)
    problems += [*listing.problems, *metadata_problems, *caption_problems]
    seen = {(problem.what, problem.where) for problem in problems}
    problems += [problem for problem in pairs.problems if (problem.what, problem.where) not in seen]
    return [
        _Captioned(
            set_index=set_index,
            repeats=one.repeats,
            path=path,
            caption=captions.get(path, ""),
            controls=pairs.controls.get(path, ()),
        )
        for path in listing.images
    ]


def _captions(listing: Listing, metadata: Metadata) -> tuple[dict[Path, str], list[Problem]]:
    """The caption of every image that has exactly one, and a problem for every other one."""
    problems: list[Problem] = []
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


def _measure_all(
    files: Iterable[Path], progress: Callable[[int, int], None] | None
) -> dict[Path, _Measured | list[Problem]]:
    """Open every image once, in a few threads."""
    paths = tuple(dict.fromkeys(files))
    measured: dict[Path, _Measured | list[Problem]] = {}
    executor = ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        # Pillow warns from 89 million pixels on and refuses at twice that; large photos are no reason to warn
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            for path, one in zip(paths, executor.map(_measured, paths), strict=True):
                measured[path] = one
                if progress is not None:
                    progress(len(measured), len(paths))
    finally:
        executor.shutdown(cancel_futures=True)
    return measured


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
    item: _Captioned,
    good: Mapping[Path, _Measured],
    sizes: Sequence[tuple[int, int]],
    trigger_word: str | None,
) -> ImageRecord:
    """One finished record."""
    measured = good[item.path]
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
        controls=tuple(_control(path, good[path]) for path in item.controls),
    )


def _control(path: Path, measured: _Measured) -> Control:
    return Control(
        path=path,
        width=measured.width,
        height=measured.height,
        content_sha256=measured.content_sha256,
    )


def capped(problems: Sequence[Problem]) -> list[Problem]:
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
