"""Control images that a sample is edited from: `control_dir` by equal stems, or names in metadata.jsonl."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from trainer.data.sets.listing import Listing, list_folder, problems_apart_from_names
from trainer.data.sets.metadata_files import METADATA_NAME, Metadata, one_form, read_metadata
from trainer.errors import Problem

if TYPE_CHECKING:
    from trainer.config.schema import DataSet

CONTROL_SIDE = 1024
"""Side of the square whose area the pipelines scale control images of another size to, in previews too."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Control images or masks by their image, and a problem for every image without one."""

    found: Mapping[Path, tuple[Path, ...]]
    problems: tuple[Problem, ...]
    unusable: bool = False
    """Whether a control folder is bad as a whole, or nobody can tell which controls belong to which image."""
    used: frozenset[Path] = frozenset()
    """All controls or masks that have an image, also of images that cannot be used."""
    strays: Mapping[Path, Problem] = field(default_factory=dict)
    """Problems of the others, to be told where no set uses them."""


def control_folders(control_dir: Path | Sequence[Path] | None) -> tuple[Path, ...]:
    """The folders that `control_dir` names."""
    if control_dir is None:
        return ()
    return (control_dir,) if isinstance(control_dir, Path) else tuple(control_dir)


def set_folders(one: DataSet) -> tuple[Path, ...]:
    """Every folder that a set names."""
    return (*control_folders(one.control_dir), *(path for path in (one.img_dir, one.mask_dir) if path))


def read_set(
    one: DataSet, folder: Path, apart: Sequence[Path], counts: tuple[int, int]
) -> tuple[Listing, Metadata, list[Problem], Pairs]:
    """(samples in the set's `folder`, metadata, its problems, control images), without what lies `apart`.

    Images that metadata names as controls only are no samples.
    """
    folders, listing = control_folders(one.control_dir), list_folder(folder, apart=apart)
    metadata, problems = read_metadata(listing.metadata, folder)
    samples, names = listing, set(metadata.named)
    if not folders:
        names |= (named := _named_controls(metadata))
        images = tuple(
            path for path in listing.images if listing.key(path) not in named - set(metadata.named)
        )
        samples = dataclasses.replace(listing, images=images)
    if one.mask_dir is None and (metadata.controls or not folders):  # else their partners go by the stem
        samples = dataclasses.replace(samples, problems=problems_apart_from_names(listing, names))
    pairs = _pair_controls(samples, metadata, folders, counts, beside=listing, apart=apart)
    return samples, metadata, problems, pairs


def pair_masks(one: DataSet, listing: Listing, apart: Sequence[Path]) -> Pairs:
    """The mask of every image in a set's `listing`."""
    return pair_stems(listing, (one.mask_dir,) if one.mask_dir is not None else (), "mask", apart)


def files_used(one: DataSet, apart: Sequence[Path], counts: tuple[int, int]) -> set[Path]:
    """The images of a set, with the control images and masks that belong to one; nothing is told of them."""
    if one.img_dir is None:
        return set()
    listing, _, _, pairs = read_set(one, one.img_dir, apart, counts)
    return {*listing.images, *pairs.used, *pair_masks(one, listing, apart).used}


def _named_controls(metadata: Metadata) -> set[str]:
    """Names of all control images in the metadata."""
    return {name for names in metadata.controls.values() for name in names}


def _pair_controls(
    listing: Listing,
    metadata: Metadata,
    folders: Sequence[Path],
    counts: tuple[int, int],
    *,
    beside: Listing,
    apart: Sequence[Path],
) -> Pairs:
    """The control images of every image in `listing`; `counts` are the least and most that a sample has.

    One folder in `folders` gives one control a sample, found by its stem, unless metadata names them:
    those lie in the first folder, or in `beside` where there is none.
    """
    problems: list[Problem] = []
    found: Mapping[Path, tuple[Path, ...]]
    unusable = bool(metadata.controls) and len(folders) > 1
    if unusable:
        what = f"{METADATA_NAME} names the control images, and there are {len(folders)} folders of them"
        remedy = "name one folder, or remove `control_file_name`"
        problems.append(Problem(what=what, where=", ".join(map(str, listing.metadata)), remedy=remedy))
    if metadata.controls:
        home = list_folder(folders[0]) if folders else beside
        found = _by_name(listing, metadata, home, problems)
        problems += problems_apart_from_names(home, _named_controls(metadata)) if folders else ()
        pairs = Pairs(
            found=found,
            problems=tuple(problems),
            unusable=unusable or home.unusable,
            used=frozenset(path for paths in found.values() for path in paths),
        )
    else:
        pairs = pair_stems(listing, folders, "control image", apart)
    found, problems = pairs.found, [*pairs.problems]
    problems += its_own(found, "control", "name the image before the edit")
    known = {problem.where for problem in problems}
    least, most = counts
    for image, controls in found.items():
        what = f"the image has {len(controls)} control images, the family"
        if len(controls) < least and str(image) not in known:
            remedy = f"set data.sets.control_dir, or write `control_file_name` in {METADATA_NAME}"
            problems.append(Problem(what=f"{what} needs {least}", where=str(image), remedy=remedy))
        elif len(controls) > most and str(image) not in known:
            problems.append(Problem(what=f"{what} takes {most}", where=str(image), remedy="leave some out"))
    return dataclasses.replace(pairs, problems=tuple(problems))


def pair_stems(listing: Listing, folders: Sequence[Path], noun: str, apart: Sequence[Path]) -> Pairs:
    """Files of equal stem in other folders, one in each, by image, whose own folder may lie in these, and so
    may those in `apart`.
    """
    listings = [
        list_folder(folder, apart=(listing.folder, *_of_others(listing, folder, apart))) for folder in folders
    ]
    problems = [problem for others in listings for problem in others.problems]
    found: dict[Path, tuple[Path, ...]] = {image: () for image in listing.images}
    # also of images that cannot be used: their partners are no second mistake
    stems = {listing.stem(listing.folder / name) for name in listing.names}
    used, strays = set[Path](), dict[Path, Problem]()
    for others in listings:
        by_stem = {others.stem(path): path for path in others.images}
        for image in listing.images:
            other = by_stem.get(listing.stem(image))
            if other is not None:
                found[image] = (*found[image], other)
            elif not others.unusable:
                what = f"no {noun} {listing.stem(image)}.* in {others.folder}"
                problems.append(Problem(what=what, where=str(image), remedy="add it, or remove this image"))
        for stem, other in by_stem.items():
            if stem in stems:
                used.add(other)
            else:
                what, remedy = f"a {noun} without an image of the same stem", "add the image, or remove this"
                strays[other] = Problem(what=what, where=str(other), remedy=remedy)
    return Pairs(
        found=found,
        problems=tuple(problems),
        unusable=any(others.unusable for others in listings),
        used=frozenset(used),
        strays=strays,
    )


def _of_others(listing: Listing, folder: Path, apart: Sequence[Path]) -> Iterator[Path]:
    """The folders in `apart` below a folder of controls or masks, but not those in whose place the listing
    has images: their partners lie there.
    """
    root = Path(os.path.realpath(folder))
    places = {str(place) for image in listing.images for place in PurePosixPath(listing.key(image)).parents}
    for path in apart:
        real = Path(os.path.realpath(path))
        if real.is_relative_to(root) and one_form(real.relative_to(root).as_posix()) not in places:
            yield path


def its_own(found: Mapping[Path, Sequence[Path]], noun: str, remedy: str) -> Iterator[Problem]:
    """A problem for every image that was found as its own partner."""
    for image, others in found.items():
        if any(image.samefile(other) for other in others):
            yield Problem(what=f"the image is its own {noun}", where=str(image), remedy=remedy)


def _by_name(
    listing: Listing, metadata: Metadata, home: Listing, problems: list[Problem]
) -> dict[Path, tuple[Path, ...]]:
    """The images that metadata names."""
    by_name = {home.key(path): path for path in home.images}
    found: dict[Path, tuple[Path, ...]] = {}
    for image in listing.images:
        names = metadata.controls.get(listing.key(image), ())
        missing = [name for name in names if name not in by_name]
        for name in missing:
            remedy = "correct the name, or add the image"
            what = f"the control image {name} is not there"
            problems.append(Problem(what=what, where=metadata.named[listing.key(image)], remedy=remedy))
        if not missing:
            found[image] = tuple(by_name[name] for name in names)
    return found
