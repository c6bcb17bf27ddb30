"""Floor 4: which images a sample is edited from: `control_dir` by equal stems, or names in metadata.jsonl."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.data.captions import METADATA_NAME, Metadata
from trainer.data.listing import Listing, list_folder
from trainer.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Control images by target, and a problem for every target and control without a partner."""

    controls: Mapping[Path, tuple[Path, ...]]
    problems: tuple[Problem, ...]


def control_folders(control_dir: Path | Sequence[Path] | None) -> tuple[Path, ...]:
    """The folders that `control_dir` names."""
    if control_dir is None:
        return ()
    return (control_dir,) if isinstance(control_dir, Path) else tuple(control_dir)


def without_controls(listing: Listing, metadata: Metadata) -> Listing:
    """The listing without the images that metadata.jsonl names as controls only: they are no samples."""
    named = {name for names in metadata.controls.values() for name in names} - set(metadata.named)
    images = tuple(path for path in listing.images if path.name not in named)
    return dataclasses.replace(listing, images=images)


def pair_controls(
    listing: Listing, metadata: Metadata, folders: Sequence[Path], counts: tuple[int, int], *, beside: Listing
) -> Pairs:
    """The control images of every image in `listing`; `counts` are the least and most that a sample has.

    One folder in `folders` gives one control a sample, found by its stem, unless metadata.jsonl names them:
    those lie in the first folder, or in `beside` where there is none.
    """
    problems: list[Problem] = []
    if metadata.controls and len(folders) > 1:
        what = f"{METADATA_NAME} names the control images, and there are {len(folders)} folders of them"
        remedy = "name one folder, or remove `control_file_name`"
        problems.append(Problem(what=what, where=str(listing.metadata), remedy=remedy))
    if metadata.controls:
        home = list_folder(folders[0]) if folders else beside
        found = _by_name(listing, metadata, home, problems)
        problems += home.problems if folders else ()
    else:
        listings = [list_folder(folder) for folder in folders]
        problems += [problem for one in listings for problem in one.problems]
        found = _by_stem(listing, list(zip(folders, listings, strict=True)), problems)
    for image, controls in found.items():
        if any(image.samefile(control) for control in controls):
            what, remedy = "the image is its own control", "name the image before the edit"
            problems.append(Problem(what=what, where=str(image), remedy=remedy))
    known = {problem.where for problem in problems}
    problems += [problem for problem in _wrong_counts(found, counts) if problem.where not in known]
    return Pairs(controls=found, problems=tuple(problems))


def _by_stem(
    listing: Listing, folders: Sequence[tuple[Path, Listing]], problems: list[Problem]
) -> dict[Path, tuple[Path, ...]]:
    """The image of equal stem in every folder."""
    found: dict[Path, tuple[Path, ...]] = {image: () for image in listing.images}
    stems = {image.stem for image in listing.images}
    for folder, controls in folders:
        by_stem = {path.stem: path for path in controls.images}
        for image in listing.images:
            control = by_stem.get(image.stem)
            if control is not None:
                found[image] = (*found[image], control)
            elif not controls.problems:
                what, remedy = f"no control image {image.stem}.* in {folder}", "add it, or remove this image"
                problems.append(Problem(what=what, where=str(image), remedy=remedy))
        for stem, control in by_stem.items():
            if stem not in stems:
                what = "a control image without an image of the same stem"
                remedy = "add the image, or remove this"
                problems.append(Problem(what=what, where=str(control), remedy=remedy))
    return found


def _by_name(
    listing: Listing, metadata: Metadata, home: Listing, problems: list[Problem]
) -> dict[Path, tuple[Path, ...]]:
    """The images that metadata.jsonl names."""
    by_name = {path.name: path for path in home.images}
    found: dict[Path, tuple[Path, ...]] = {}
    for image in listing.images:
        names = metadata.controls.get(image.name, ())
        missing = [name for name in names if name not in by_name]
        for name in missing:
            remedy = "correct the name, or add the image"
            what = f"the control image {name} is not there"
            problems.append(Problem(what=what, where=metadata.named[image.name], remedy=remedy))
        if not missing:
            found[image] = tuple(by_name[name] for name in names)
    return found


def _wrong_counts(found: Mapping[Path, tuple[Path, ...]], counts: tuple[int, int]) -> Iterator[Problem]:
    """A problem for every image with too few or too many controls."""
    least, most = counts
    for image, controls in found.items():
        if len(controls) < least:
            what = f"the image has {len(controls)} control images, the family needs {least}"
            remedy = f"set data.sets.control_dir, or write `control_file_name` in {METADATA_NAME}"
            yield Problem(what=what, where=str(image), remedy=remedy)
        elif len(controls) > most:
            what = f"the image has {len(controls)} control images, the family takes {most}"
            yield Problem(what=what, where=str(image), remedy="leave some out")
