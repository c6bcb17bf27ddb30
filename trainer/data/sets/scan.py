"""Image sets as records, with every problem of every set found before anything is loaded."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Literal

from trainer.config.schema import DataSet
from trainer.data.caption_text import read_sidecar, with_trigger_word
from trainer.data.leftout import capped, list_left_out, nothing_left
from trainer.data.pictures.buckets import buckets, nearest_bucket
from trainer.data.pictures.images import Measured
from trainer.data.pictures.opened import control_of, open_all
from trainer.data.records import ImageRecord, LeftOut, Mask, Scan
from trainer.data.sets import notices
from trainer.data.sets.controls import files_used, its_own, pair_masks, read_set, set_folders
from trainer.data.sets.listing import Listing
from trainer.data.sets.metadata_files import METADATA_NAMES, Metadata, one_form
from trainer.errors import DataError, Problem

_ASPECT_TOLERANCE = 0.01
"""The largest difference of a mask's aspect from its image's, as a share."""


@dataclass(frozen=True, kw_only=True)
class Captioned:
    """An image file with its caption, not yet opened."""

    set_index: int
    name: str
    path: Path
    caption: str
    controls: tuple[Path, ...]
    masks: tuple[Path, ...]
    """One, or none."""
    caption_from: str = ""
    """File of the caption, of metadata with its row, also of one that cannot be used; empty where none is."""


@dataclass(kw_only=True)
class Found:
    """The images of the sets, and every problem with them."""

    images: list[Captioned] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    fatal: bool = False
    """Whether a folder is bad as a whole, which skipping files cannot mend."""
    files: list[Path] = field(default_factory=list)
    """The images with their control images and masks."""
    used: set[Path] = field(default_factory=set)
    """These files, and the control images and masks of images that cannot be used."""
    strays: dict[Path, Problem] = field(default_factory=dict)
    """Control images and masks that one set has no image of, with what is told of those that none uses."""
    spoils: defaultdict[str, list[str]] = field(default_factory=functools.partial(defaultdict, list))
    """Places of problems -> images that cannot be used because of them."""
    good: Mapping[Path, Measured] = field(default_factory=dict)
    """The files that could be used when they were opened."""

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Images that cannot be used and files that should not be there, each with all reasons."""
        return list_left_out(self.problems, self.spoils)


def scan_images(
    sets: Sequence[DataSet],
    *,
    beside: Sequence[DataSet] = (),
    resolution: int,
    multiple: int,
    trigger_word: str | None,
    controls: tuple[int, int] = (0, 0),
    on_bad_file: Literal["error", "skip"] = "error",
    progress: Callable[[int, int], None] | None = None,
) -> Scan:
    """Records of all images of all sets, in order of set and file name, each decoded to its last byte.

    Folders of sets in `beside` hold no samples of these. `controls` are the least and most control images of
    a sample. `progress(done, total)` runs in the calling thread, once per image, and may raise to stop.
    Raises one DataError with all problems of all sets; with `skip` only for folders that are wrong as a
    whole, and where nothing would be left.
    """
    sizes = buckets(resolution, multiple)
    found = find_images(sets, controls, beside=beside)
    open_images(found, progress=progress)
    records = [
        _record(item, sets[item.set_index], found.good, sizes, trigger_word)
        for item in usable(found, on_bad_file)
    ]
    notices.tell(records, found.good, sets)
    return Scan(records=tuple(records), left_out=found.left_out)


def find_images(
    sets: Sequence[DataSet], controls: tuple[int, int], *, beside: Sequence[DataSet] = ()
) -> Found:
    """The images of all sets with their captions, in order of set and file name, none of the sets in
    `beside`; no picture is opened.
    """
    found = Found()
    apart = [folder for one in (*sets, *beside) for folder in set_folders(one)]
    for set_index, one in enumerate(sets):
        _list_set(set_index, one, controls, found, apart)
    if found.strays:
        found.used.update(*(files_used(one, apart, controls) for one in beside))
        used = {os.path.realpath(path) for path in found.used}
        strays = {os.path.realpath(path): problem for path, problem in found.strays.items()}
        found.problems += [problem for path, problem in strays.items() if path not in used]
    return found


def usable(found: Found, on_bad_file: Literal["error", "skip"]) -> list[Captioned]:
    """The images in `found` that can be used as far as is known. Raises DataError as `scan_images` does."""
    if found.problems and (found.fatal or on_bad_file == "error"):
        raise DataError(capped(found.problems))
    bad = {file for file, _ in found.left_out}
    images = [item for item in found.images if str(item.path) not in bad]
    if not images:
        raise nothing_left(found.problems)
    return images


def open_images(
    found: Found,
    *,
    known: Mapping[Path, Measured] = MappingProxyType({}),
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Open every file in `found`, those in `known` apart, and add what is good and what is wrong to it."""
    masks = {mask for item in found.images for mask in item.masks}
    found.good, problems = open_all(found.files, masks=masks, known=known, progress=progress)
    found.problems += [*problems, *_mask_problems(found.images, found.good)]


def _list_set(
    set_index: int, one: DataSet, counts: tuple[int, int], found: Found, apart: Sequence[Path]
) -> None:
    """The images of one set with captions, control images and masks; not those in folders of others."""
    assert one.img_dir is not None, "the configuration was checked"
    listing, metadata, metadata_problems, pairs = read_set(one, one.img_dir, apart, counts)
    masks = pair_masks(one, listing, apart)
    own_masks = its_own(masks.found, "mask", "name a folder of masks in data.sets.mask_dir")
    sidecars = {listing.stem(path): path for path in listing.captions}
    captions, caption_problems = _captions(listing, metadata, sidecars)
    problems = [*listing.problems, *metadata_problems, *caption_problems, *pairs.problems]
    problems += [*masks.problems, *own_masks]
    found.problems += {(problem.what, problem.where): problem for problem in problems}.values()
    found.used.update(listing.images, pairs.used, masks.used)
    found.strays.update({**pairs.strays, **masks.strays})
    found.fatal = found.fatal or listing.unusable or pairs.unusable or masks.unusable
    by_stem: defaultdict[str, list[str]] = defaultdict(list)
    for image in listing.images:
        item = Captioned(
            set_index=set_index,
            name=image.relative_to(listing.folder).as_posix(),
            path=image,
            caption=captions.get(image, ""),
            controls=pairs.found.get(image, ()),
            masks=masks.found.get(image, ()),
            caption_from=str(sidecars.get(listing.stem(image)) or metadata.named.get(listing.key(image), "")),
        )
        found.images.append(item)
        files = (image, *item.controls, *item.masks)
        found.files += files
        for file in files:
            found.spoils[str(file)].append(str(image))
        by_stem[listing.stem(image)].append(str(image))
    # also rows of metadata and caption files that cannot be used spoil their images
    by_name = {listing.key(image): image for image in listing.images}
    for where, name in (*((row, name) for name, row in metadata.named.items()), *metadata.again.items()):
        if name in by_name:
            found.spoils[where].append(str(by_name[name]))
    for path in (listing.folder / name for name in listing.names):
        if path.suffix.lower() == ".txt":
            found.spoils[str(path)] += by_stem.get(listing.stem(path), ())


def _captions(
    listing: Listing, metadata: Metadata, sidecars: Mapping[str, Path]
) -> tuple[dict[Path, str], list[Problem]]:
    """The caption of every image that has exactly one, and a problem for every other one."""
    problems: list[Problem] = []
    captions: dict[Path, str] = {}
    names = {one_form(name): name for name in listing.names}
    for image in listing.images:
        stem, name = listing.stem(image), listing.key(image)
        sidecar, row, written = sidecars.get(stem), metadata.named.get(name), names.get(f"{stem}.txt")
        if sidecar is not None and row is not None:
            what = f"the image has a caption in {sidecar.name} and in {row}"
            problems.append(Problem(what=what, where=str(image), remedy="remove one of them"))
        elif sidecar is not None:
            try:
                captions[image] = read_sidecar(sidecar)
            except DataError as error:
                problems += error.problems
        elif name in metadata.rows:
            captions[image] = metadata.rows[name]
        elif row is None and written is None:
            problems.append(_no_caption(image, listing.metadata))
        # anything else that it can be was told by the listing
        elif row is None and written and (caption := listing.folder / written).is_dir():
            remedy = "write the caption into a text file of this name"
            problems.append(Problem(what="the caption is a folder", where=str(caption), remedy=remedy))
    images = {listing.key(image) for image in listing.images}
    problems += [
        _no_image(name, where, listing, set(names))
        for name, where in metadata.named.items()
        if name not in images
    ]
    return captions, problems


def _no_image(name: str, where: str, listing: Listing, names: Set[str]) -> Problem:
    """A line of metadata whose name is no sample's."""
    what, remedy = f"{name} is not in the folder", "correct the name, or remove the line"
    inside = PurePosixPath(name)
    if name in names:
        what = f"{name} is not an image that can be read"
    elif inside.parent.parts and _is_shown(listing.folder, inside):
        what = f"{name} is in a folder of another set, of masks or of controls"
        remedy = f"write the line into the metadata of {inside.parent}, where its set reads it"
    return Problem(what=what, where=where, remedy=remedy)


def _is_shown(folder: Path, inside: PurePosixPath) -> bool:
    """Whether the file is there and nothing on its way is hidden."""
    return not any(part.startswith(".") for part in inside.parts) and os.path.isfile(folder / inside)  # noqa: PTH113


def _no_caption(image: Path, metadata: Sequence[Path]) -> Problem:
    """An image without a caption, and where one could go."""
    if not metadata:
        remedy = f"write {image.stem}.txt beside it, or name it in a {' or '.join(METADATA_NAMES)}"
        return Problem(what="the image has no caption", where=str(image), remedy=remedy)
    remedy = f"add a line for it, or write {image.stem}.txt beside it"
    files = ", ".join(dict.fromkeys(path.name for path in metadata))
    return Problem(what=f"the image is not named in {files}", where=str(image), remedy=remedy)


def _mask_problems(images: Sequence[Captioned], good: Mapping[Path, Measured]) -> Iterator[Problem]:
    """A problem for every mask of another aspect than its image, so that nobody knows what it covers."""
    for item, path in ((one, mask) for one in images for mask in one.masks):
        if path not in good or item.path not in good:
            continue
        image, mask = good[item.path], good[path]
        if abs(mask.width * image.height / (mask.height * image.width) - 1) > _ASPECT_TOLERANCE:
            what = f"the mask has {mask.width}x{mask.height} pixels, its image {image.width}x{image.height}"
            remedy = "give it the image's size, or another of its aspect"
            yield Problem(what=what, where=str(path), remedy=remedy)


def _record(
    item: Captioned,
    one: DataSet,
    good: Mapping[Path, Measured],
    sizes: Sequence[tuple[int, int]],
    trigger_word: str | None,
) -> ImageRecord:
    """One finished record."""
    assert item.caption, "an image without a caption was left in"
    measured = good[item.path]
    bucket_width, bucket_height = nearest_bucket(measured.width, measured.height, sizes)
    masks = [
        Mask(path=path, content_sha256=good[path].content_sha256, depth=good[path].depth)
        for path in item.masks
    ]
    return ImageRecord(
        path=item.path,
        identifier=f"{item.set_index}/{item.name}",
        # the pictures of a regularisation set show everything that the trigger word does not mean
        caption=item.caption if one.is_reg else with_trigger_word(item.caption, trigger_word),
        width=measured.width,
        height=measured.height,
        bucket_width=bucket_width,
        bucket_height=bucket_height,
        repeats=one.repeats,
        content_sha256=measured.content_sha256,
        colour=measured.colour,
        controls=tuple(control_of(path, good[path]) for path in item.controls),
        set_index=item.set_index,
        mask=masks[0] if masks else None,
        loss_weight=one.loss_weight,
        is_reg=one.is_reg,
    )
