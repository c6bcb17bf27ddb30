"""The files in the folder of an image set: images, captions, metadata, and those that should not be there."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from trainer.data.caption_text import encodable
from trainer.data.pictures.formats import FORMATS_TEXT, SUFFIXES
from trainer.data.sets.metadata_files import METADATA_NAMES, one_form
from trainer.errors import Problem

# left by systems and other programs, never meant as samples; hidden files and folders are passed over too
_CLUTTER_NAMES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})
_CLUTTER_STEMS = frozenset({"readme", "license", "licence"})
_CLUTTER_SUFFIXES = frozenset({".npz", ".pt", ".safetensors"})  # other trainers' caches
# fmt: off
_OTHER_MEDIA = frozenset({
    ".cr2", ".dng", ".gif", ".heic", ".heif", ".ico", ".jfif", ".jp2", ".jpe", ".jxl",
    ".nef", ".psd", ".svg", ".tga", ".avi", ".mkv", ".mov", ".mp4", ".webm",
})
# fmt: on
NO_IMAGE = "the folder holds no image"
"""Beginning of what is told of a folder in which there is nothing."""
_PICTURE_SUFFIXES = _OTHER_MEDIA.union(SUFFIXES)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The usable files of one folder and those below it, by name order, and a problem for every other one."""

    folder: Path
    images: tuple[Path, ...] = ()
    captions: tuple[Path, ...] = ()
    metadata: tuple[Path, ...] = ()
    names: frozenset[str] = frozenset()
    """Everything in the folders, usable or not; names are relative to `folder`."""
    problems: tuple[Problem, ...] = ()
    unusable: bool = False
    """Whether no file of the set can be read, or none is an image."""

    def key(self, path: Path) -> str:
        """A file's name within the set, in the form in which metadata is looked up: `pets/cat.png`."""
        return one_form(path.relative_to(self.folder).as_posix())

    def stem(self, path: Path) -> str:
        """The name without its suffix, by which captions, controls and masks are found: `pets/cat`."""
        return one_form(path.relative_to(self.folder).with_suffix("").as_posix())


def list_folder(folder: Path, *, apart: Sequence[Path] = ()) -> Listing:
    """Sort the files of `folder` and its sub-folders; nothing is opened, nothing left out without a word.

    Sub-folders in `apart` (those of masks and controls, and other sets) are passed over.
    """
    try:
        root = folder.resolve(strict=True)
        os.scandir(folder).close()
    except (OSError, RuntimeError) as error:
        return Listing(folder=folder, problems=(_unreadable_folder(folder, error),), unusable=True)
    # unlike Path.resolve, realpath never raises
    others = {Path(os.path.realpath(path)) for path in apart} - {root}
    usable: list[str] = []
    names: list[str] = []
    problems: list[Problem] = []
    waiting, visited = [folder], {root}
    while waiting:  # no recursion: folders may be nested deeper than Python's stack
        inside = waiting.pop()
        found = _names(inside)
        if isinstance(found, Problem):
            problems.append(found)
            continue
        for path in (inside / name for name in found):
            names.append(path.relative_to(folder).as_posix())
            if path.name.startswith(".") or path.name.casefold() in _CLUTTER_NAMES:
                continue
            problem = _entry_problem(path, root)
            if problem is None and not path.is_dir():
                usable.append(names[-1])
            elif problem is None and (real := path.resolve()) not in others:
                # a link to a hidden folder is followed: Kubernetes mounts files so
                hidden = any(part.startswith(".") for part in real.relative_to(root).parts)
                if real in visited or (path.is_symlink() and not hidden):
                    what = "the symbolic link leads to a folder that is read already"
                    problem = Problem(what=what, where=str(path), remedy="remove the link")
                else:
                    visited.add(real)
                    waiting.append(path)
            problems += [problem] if problem is not None else []
    return _sorted(folder, usable, names, problems)


def _names(folder: Path) -> list[str] | Problem:
    """The names in a folder, sorted; a problem where it cannot be listed, or not be entered."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError as error:
        return _unreadable_folder(folder, error)
    try:
        if names:
            (folder / names[0]).lstat()
    except PermissionError:  # as after `chmod -R 644`
        remedy = f"let it be entered: chmod -R u+rwX '{folder}'"
        return Problem(what="the folder may be listed, but not entered", where=str(folder), remedy=remedy)
    except OSError:
        pass  # told of the file itself
    return names


def _sorted(folder: Path, usable: list[str], names: list[str], problems: list[Problem]) -> Listing:
    """The files that were found, by kind."""
    files = [folder / name for name in sorted(usable)]
    listing = Listing(
        folder=folder,
        images=tuple(path for path in files if path.suffix.lower() in SUFFIXES),
        metadata=tuple(path for path in files if path.name in METADATA_NAMES),
        names=frozenset(names),
    )
    # also of pictures that are refused: their captions are no second mistake
    stems = {listing.stem(folder / name) for name in names if Path(name).suffix.lower() in _PICTURE_SUFFIXES}
    captions = tuple(path for path in files if path.suffix.lower() == ".txt" and listing.stem(path) in stems)
    listing = dataclasses.replace(listing, captions=captions)
    known = {*listing.images, *captions, *listing.metadata}
    problems = [*problems, *_leftovers(path for path in files if path not in known), *_seconds(listing)]
    empty = not listing.images and not problems
    if empty:
        what = f"{NO_IMAGE}; {FORMATS_TEXT}"
        problems = [Problem(what=what, where=str(folder), remedy="put images with captions into it")]
    return dataclasses.replace(listing, problems=tuple(problems), unusable=empty)


def _unreadable_folder(folder: Path, error: Exception) -> Problem:
    """Why a folder cannot be listed."""
    if isinstance(error, FileNotFoundError):
        what = "the folder does not exist"
    elif isinstance(error, NotADirectoryError):
        what = "this is a file, not a folder"
    else:
        text = error.strerror if isinstance(error, OSError) else ""
        what = f"the folder cannot be read: {text or error}"
    remedy = "check its name, and in a container that the folder is mounted and readable for its user"
    return Problem(what=what, where=str(folder), remedy=remedy)


def _entry_problem(path: Path, root: Path) -> Problem | None:
    """Why an entry cannot be used whatever its suffix is, or None."""
    where = str(path)
    if not encodable(where):  # names on disk need not be UTF-8
        where = where.encode("utf-8", "backslashreplace").decode()
        return Problem(what="the file name is not valid UTF-8", where=where, remedy="rename it")
    is_link = False
    try:
        is_link = stat.S_ISLNK(path.lstat().st_mode)
        if is_link and not (real := path.resolve(strict=True)).is_relative_to(root):
            what, remedy = "the symbolic link leads out of the folder", "copy the file itself into the folder"
            if root.is_relative_to(real):
                what, remedy = "the symbolic link leads to a folder around this one", "remove the link"
            return Problem(what=what, where=where, remedy=remedy)
        mode = path.stat().st_mode
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            remedy = "move the folder up, or give the folders above it shorter names"
            return Problem(what="its path is too long for this system", where=where, remedy=remedy)
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        what = "the symbolic link leads nowhere" if is_link else f"the file cannot be read: {reason}"
        return Problem(what=what, where=where, remedy="copy the file itself into the folder, or remove it")
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return Problem(what="this is not a regular file", where=where, remedy="move it away")
    return None


def _leftovers(paths: Iterable[Path]) -> Iterator[Problem]:
    """A problem for every file that is neither an image, nor the caption of one, nor the metadata, unless it
    may lie there without being a mistake.
    """
    for path in paths:
        suffix, stem = path.suffix.lower(), path.stem.casefold()
        if stem in _CLUTTER_STEMS or suffix in _CLUTTER_SUFFIXES:
            continue
        what, remedy = "neither an image nor a caption", "move it away"
        if suffix in _OTHER_MEDIA:
            what, remedy = (
                f"{suffix} files are not read; {FORMATS_TEXT}",
                "convert it to png, or move it away",
            )
        elif suffix == ".caption":
            what = ".caption files are not read"
            remedy = f"rename it to {path.with_suffix('.txt').name}, or move it away"
        elif suffix == ".txt":
            what = "a caption without an image of the same name"
            remedy = "rename it like its image, or move it away"
        elif stem in {"metadata", "captions"}:
            what = "captions are not read from this file"
            remedy = f"write {' or '.join(METADATA_NAMES)}, or .txt beside the images"
        yield Problem(what=what, where=str(path), remedy=remedy)


def problems_apart_from_names(listing: Listing, names: Set[str]) -> tuple[Problem, ...]:
    """The listing's problems, but not those of images of one stem that have no caption beside them and whose
    names (`Listing.key`) are all among `names`, by which metadata tells them apart.
    """
    captioned = {listing.stem(path) for path in listing.captions}
    of_stem: defaultdict[str, list[Path]] = defaultdict(list)
    for path in listing.images:
        of_stem[listing.stem(path)].append(path)
    apart = []
    for stem, paths in of_stem.items():
        keys = {listing.key(path) for path in paths}
        if stem not in captioned and keys <= names and len(keys) == len(paths):
            apart += paths
    known = {*_second_stems(listing, "image", apart)}
    return tuple(problem for problem in listing.problems if problem not in known)


def _second_stems(listing: Listing, noun: str, paths: Iterable[Path]) -> Iterator[Problem]:
    """A problem for every one of `paths` whose stem an earlier one has."""
    of_stem: dict[str, Path] = {}
    for path in paths:
        earlier = of_stem.setdefault(listing.stem(path), path)
        if earlier != path:
            same = path.with_suffix("") == earlier.with_suffix("")
            form = "" if same else ", whose accents are encoded in another way (NFC and NFD)"
            what = f"a second {noun} with the stem of {earlier.name}{form}"
            yield Problem(what=what, where=str(path), remedy="rename one of them, with its caption")


def _seconds(listing: Listing) -> Iterator[Problem]:
    """A problem for every image and caption whose stem an earlier one has, because captions go by it, and for
    every second file of metadata in a folder.
    """
    yield from _second_stems(listing, "image", listing.images)
    yield from _second_stems(listing, "caption", listing.captions)
    in_folder: dict[Path, Path] = {}
    for path in listing.metadata:
        earlier = in_folder.setdefault(path.parent, path)
        if earlier != path:
            what = f"captions are in {earlier.name} already"
            yield Problem(what=what, where=str(path), remedy="keep one of the two files")
