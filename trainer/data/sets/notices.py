"""Warnings of a data set's odd sides that are no mistakes, each told once."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.config.schema import DataSet
from trainer.data.leftout import first_lines
from trainer.data.pictures.images import Measured
from trainer.data.pictures.variants import names_a_side
from trainer.data.records import ImageRecord
from trainer.data.sets.controls import CONTROL_SIDE
from trainer.words.plurals import numbered

_SHOWN = 20
# the names of folders from which kohya's scripts read repeats
_REPEATS_IN_NAME = re.compile(r"(\d+)_.+")
_log = logging.getLogger(__name__)


def tell(records: Sequence[ImageRecord], measured: Mapping[Path, Measured], sets: Sequence[DataSet]) -> None:
    """Warn of images that are smaller than what they are trained at, which blurs them; of files of equal
    content, which count twice; of colour profiles that are not applied, those of masks aside, which mean
    nothing; of mirrored images whose captions say left or right; of control images that are encoded larger
    than their pictures are trained; and of numbers in names of folders.
    """
    small = [one for one in records if one.width < one.bucket_width or one.height < one.bucket_height]
    if small:
        least = min(small, key=lambda record: (record.width * record.height, record.identifier))
        _log.warning(
            "%d of %d images %s trained at and enlarged; the smallest is %s with %dx%d. A smaller "
            "data.resolution, or larger images, would be sharper.",
            len(small), len(records),
            "is smaller than what it is" if len(small) == 1 else "are smaller than what they are",
            least.path, least.width, least.height,
        )  # fmt: skip
    first: dict[str, Path] = {}
    pairs = [(record.path, first.setdefault(record.content_sha256, record.path)) for record in records]
    lines = [f"{path} = {original}" for path, original in pairs if original != path]
    if lines:
        _log.warning(
            "%d of %d images %s of others and count again (to weigh images on purpose, write `repeats`):\n%s",
            len(lines), len(records), "is a copy" if len(lines) == 1 else "are copies",
            first_lines(lines, _SHOWN),
        )  # fmt: skip
    files = [path for record in records for path in (record.path, *(one.path for one in record.controls))]
    unapplied = {path: measured[path].unapplied for path in files if measured[path].unapplied}
    if unapplied:
        lines = [f"{path}: {problem}" for path, problem in unapplied.items()]
        count = numbered(len(lines), "image is", "images are")
        _log.warning("%s read as sRGB:\n%s", count, first_lines(lines, _SHOWN))
    wrong = [record for record in records if sets[record.set_index].flip and names_a_side(record.caption)]
    if wrong:
        _log.warning(
            "`flip` is on, and %s left or right, which is wrong of the mirrored image. Leave flip out for "
            "such, or reword:\n%s",
            numbered(len(wrong), "caption says", "captions say"),
            first_lines([f"{one.path}: {one.caption:.100}" for one in wrong], _SHOWN),
        )  # fmt: skip
    _tell_larger_controls(records)
    _tell_numbered_folders(records, sets)


def _tell_larger_controls(records: Sequence[ImageRecord]) -> None:
    """Warn of controls of another size than their picture, which the pipelines scale to the area that edited
    pictures mostly have: a step takes many times as long where the others are small.
    """
    of_pictures = [(control, record) for record in records for control in record.controls]
    larger = {
        control.path: control
        for control, record in of_pictures
        if (control.width, control.height) != (record.width, record.height)
        and record.bucket_width * record.bucket_height < 0.9 * CONTROL_SIDE**2
    }
    if larger:
        first = next(iter(larger.values()))
        _log.warning(
            "%d of %d control images have another size than their picture and become about %dx%d, larger than"
            " what is trained: steps take longer. The first is %s with %dx%d. Write them at their picture's"
            " size, where they show the same view.",
            len(larger), len({control.path for control, _ in of_pictures}), CONTROL_SIDE, CONTROL_SIDE,
            first.path, first.width, first.height,
        )  # fmt: skip


def _tell_numbered_folders(records: Sequence[ImageRecord], sets: Sequence[DataSet]) -> None:
    """Warn of folders whose names hold repeats elsewhere, unless it is a set that has some."""
    numbers: dict[Path, str] = {}
    for record in records:
        one = sets[record.set_index]
        assert one.img_dir is not None, "a set of images"
        below = [folder for folder in record.path.parents if folder.is_relative_to(one.img_dir)]
        for folder in below:
            number = _REPEATS_IN_NAME.fullmatch(folder.name)
            if number and int(number[1]) > 1 and (folder != one.img_dir or one.repeats == 1):
                numbers[folder] = number[1]
    for folder, number_text in numbers.items():
        _log.warning(
            "%s: other trainers read %s repeats from such a name; here a name says nothing. Write it as a "
            "set of its own under data.sets, with `repeats: %s`, if that is meant.",
            folder, number_text, number_text,
        )  # fmt: skip
