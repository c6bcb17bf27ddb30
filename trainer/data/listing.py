"""Floor 4: what lies in the folder of an image set: images, captions, metadata, and what should not be."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.data.captions import METADATA_NAME
from trainer.data.images import FORMATS_TEXT, SUFFIXES
from trainer.errors import Problem

# Left by systems and other programs, never meant as samples. Hidden files and folders are passed over too.
_CLUTTER_NAMES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})
_CLUTTER_STEMS = frozenset({"readme", "license", "licence"})
_CLUTTER_SUFFIXES = frozenset({".npz"})  # other trainers' caches
# fmt: off
_OTHER_MEDIA = frozenset({
    ".avif", ".bmp", ".cr2", ".dng", ".gif", ".heic", ".heif", ".ico", ".jfif", ".jp2", ".jpe", ".jxl",
    ".nef", ".psd", ".svg", ".tga", ".tif", ".tiff", ".avi", ".mkv", ".mov", ".mp4", ".webm",
})
# fmt: on
_PICTURE_SUFFIXES = _OTHER_MEDIA.union(SUFFIXES)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The usable files of one folder, by name order, and a problem for every other one."""

    images: tuple[Path, ...] = ()
    captions: tuple[Path, ...] = ()
    metadata: Path | None = None
    names: frozenset[str] = frozenset()
    """Everything in the folder, usable or not."""
    problems: tuple[Problem, ...] = ()


def list_folder(folder: Path) -> Listing:
    """Sort the entries of `folder`; nothing is opened and nothing is left out without a word."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
        root = folder.resolve(strict=True)
    except OSError as error:
        return Listing(problems=(_unreadable_folder(folder, error),))
    problems: list[Problem] = []
    usable: list[Path] = []
    for name in names:
        path = folder / name
        if name.startswith(".") or name.casefold() in _CLUTTER_NAMES:
            continue
        problem = _entry_problem(path, root)
        if problem is None:
            usable.append(path)
        else:
            problems.append(problem)
    images = tuple(path for path in usable if path.suffix.lower() in SUFFIXES)
    # also of pictures that are refused: their captions are no second mistake
    stems = {Path(name).stem for name in names if Path(name).suffix.lower() in _PICTURE_SUFFIXES}
    captions = tuple(path for path in usable if path.suffix.lower() == ".txt" and path.stem in stems)
    metadata = next((path for path in usable if path.name == METADATA_NAME), None)
    known = {*images, *captions, metadata}
    problems += [_leftover(path) for path in usable if path not in known and not _is_clutter(path)]
    problems += _duplicates(images, "image") + _duplicates(captions, "caption")
    if not images and not problems:
        what = f"the folder holds no image; {FORMATS_TEXT}"
        problems.append(Problem(what=what, where=str(folder), remedy="put images with captions into it"))
    return Listing(
        images=images, captions=captions, metadata=metadata, names=frozenset(names), problems=tuple(problems)
    )


def _unreadable_folder(folder: Path, error: OSError) -> Problem:
    """Why a folder cannot be listed."""
    if isinstance(error, FileNotFoundError):
        what = "the folder does not exist"
    elif isinstance(error, NotADirectoryError):
        what = "this is a file, not a folder"
    else:
        what = f"the folder cannot be read: {error.strerror or error}"
    remedy = "check `img_dir`, and in a container that the folder is mounted and readable for its user"
    return Problem(what=what, where=str(folder), remedy=remedy)


def _entry_problem(path: Path, root: Path) -> Problem | None:
    """Why an entry cannot be used whatever its suffix is, or None."""
    where = str(path)
    if not _printable(where):
        where = where.encode("utf-8", "backslashreplace").decode()
        return Problem(what="the file name is not valid UTF-8", where=where, remedy="rename it")
    try:
        if path.is_symlink() and not path.resolve(strict=True).is_relative_to(root):
            what = "the symbolic link leads out of the folder"
            return Problem(what=what, where=where, remedy="copy the file itself into the folder")
        mode = path.stat().st_mode
    except (OSError, RuntimeError) as error:
        what = "the symbolic link leads nowhere" if path.is_symlink() else f"the file cannot be read: {error}"
        return Problem(what=what, where=where, remedy="copy the file itself into the folder, or remove it")
    if stat.S_ISDIR(mode):
        what = "a folder inside an image folder is not read"
        return Problem(what=what, where=where, remedy="list it under `data.sets` as a set, or move it away")
    if not stat.S_ISREG(mode):
        return Problem(what="this is not a regular file", where=where, remedy="move it away")
    return None


def _is_clutter(path: Path) -> bool:
    """Whether a file that belongs to no image may lie there without being a mistake."""
    return path.stem.casefold() in _CLUTTER_STEMS or path.suffix.lower() in _CLUTTER_SUFFIXES


def _leftover(path: Path) -> Problem:
    """What to say about a file that is neither an image, nor the caption of one, nor the metadata."""
    suffix = path.suffix.lower()
    if suffix in _OTHER_MEDIA:
        what, remedy = f"{suffix} files are not read; {FORMATS_TEXT}", "convert it to png, or move it away"
    elif suffix == ".txt":
        what, remedy = (
            "a caption without an image of the same name",
            "rename it like its image, or move it away",
        )
    elif path.stem.casefold() in {"metadata", "captions"}:
        what, remedy = (
            "captions are not read from this file",
            f"write {METADATA_NAME}, or .txt beside the images",
        )
    else:
        what, remedy = "neither an image nor a caption", "move it away"
    return Problem(what=what, where=str(path), remedy=remedy)


def _duplicates(paths: tuple[Path, ...], noun: str) -> list[Problem]:
    """A problem for every file whose stem an earlier one has: captions go by the stem."""

    def later() -> Iterator[tuple[Path, Path]]:
        first: dict[str, Path] = {}
        for path in paths:
            if first.setdefault(path.stem, path) != path:
                yield path, first[path.stem]

    return [
        Problem(
            what=f"a second {noun} with the stem of {earlier.name}",
            where=str(path),
            remedy="rename one of them, with its caption",
        )
        for path, earlier in later()
    ]


def _printable(text: str) -> bool:
    """Whether a name can be written to logs and JSON: names on disk need not be UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
