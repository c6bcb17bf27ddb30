"""Folders of data sets, named by ids, and files in them that are opened without following a link."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from trainer.data.pictures.formats import SUFFIXES
from trainer.errors import DataError, TrainerError
from trainer.files import atomic
from trainer.ui.opened import folder_below, open_no_link
from trainer.ui.studio import Studio, found_by_id, identifier

WHOLE_ROOT = "."
"""Name of the data set that the root itself is, where pictures lie right in it."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One data set: a folder right below `root`, or the root itself."""

    root: Path
    """Folder of all data sets."""
    studio: Path
    """The studio's own folder."""
    name: str

    @property
    def folder(self) -> Path:
        """Folder of the pictures."""
        return self.root / self.name

    @property
    def id(self) -> str:
        """The data set's id in URLs."""
        return identifier(self.root, self.folder)

    @property
    def title(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def state(self) -> Path:
        """Folder of what the studio keeps about this data set, and not about one of its name elsewhere."""
        return self.studio / "datasets" / identifier(Path("/"), self.folder)

    @property
    def writable(self) -> bool:
        """True if this process may create files in the data set."""
        return os.access(self.folder, os.W_OK | os.X_OK)


def places(studio: Studio) -> list[Place]:
    """All data sets in order of name; hidden folders and links are none, nor is there one without the root.

    Raises DataError where the root cannot be listed.
    """
    root = studio.data
    try:
        with os.scandir(root) as entries:
            found = sorted((one.name, one.is_dir(follow_symlinks=False)) for one in entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        remedy = "let this user read it, or start the studio with another --data"
        what = f"the folder of data sets cannot be read: {error.strerror or error}"
        raise DataError(what, where=str(root), remedy=remedy) from error
    names = [name for name, is_folder in found if is_folder and not name.startswith(".")]
    if any(PurePosixPath(name).suffix.lower() in SUFFIXES for name, is_folder in found if not is_folder):
        names.insert(0, WHOLE_ROOT)
    return [Place(root=root, studio=studio.folder, name=name) for name in names]


def place_of(studio: Studio, given: str) -> Place:
    """The data set of an id. Raises UnknownIdError."""
    found = {place.folder: place for place in places(studio)}
    return found[found_by_id(studio.data, given, found)]


def new_place(studio: Studio, name: str) -> Place:
    """A new, empty data set. Raises DataError where the name is taken, or is none, StorageError."""
    if not name or name.startswith("."):
        raise DataError("the data set needs a name of letters or digits", remedy="write one, such as cats")
    place = Place(root=studio.data, studio=studio.folder, name=name)
    try:
        with atomic.no_space_told(place.folder):
            place.folder.mkdir(parents=True)
    except FileExistsError as error:
        raise DataError("there is a data set of this name", where=name, remedy="choose another") from error
    return place


def folders(studio: Studio) -> list[str]:
    """Names of data sets and of folders right below them, in which masks and control images may lie."""
    found = [one for one in places(studio) if one.name != WHOLE_ROOT]
    below = [path for one in found for path in one.folder.glob("[!.]*/") if not path.is_symlink()]
    return sorted(
        path.relative_to(studio.data).as_posix() for path in (*(one.folder for one in found), *below)
    )


@contextlib.contextmanager
def held(place: Place, name: str) -> Iterator[Path]:
    """Give a file's path through the descriptor of its folder, as `folder_below` does.

    `name` is relative to the root. Raises DataError where a link, or a name that is gone, is on the way, and
    for another error of the system; our own errors inside the block name the file instead of the descriptor.
    """
    parts = PurePosixPath(name).parts
    assert parts and ".." not in parts and not name.startswith("/"), "names come from listings"
    real = place.root / name
    try:
        with folder_below(place.root, real) as path:
            try:
                yield path
            except TrainerError as error:
                inside, outside = str(path.parent), str(real.parent)
                problems = [
                    dataclasses.replace(one, where=one.where.replace(inside, outside))
                    for one in error.problems
                ]
                raise type(error)(problems) from error
    except OSError as error:
        what, remedy = (
            f"the file cannot be used: {error.strerror or error}",
            "let this user read and write it",
        )
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENOENT):
            what = "the file is gone, or is reached by a link, which the studio does not follow"
            remedy = "look at the data set again"
        raise DataError(what, where=str(real), remedy=remedy) from error


@contextlib.contextmanager
def opened(place: Place, name: str) -> Iterator[BinaryIO]:
    """Give a file for reading that neither is a link nor is reached by one. Raises DataError."""
    with held(place, name) as path, open_no_link(path) as file:
        yield file


def require_writable(place: Place) -> None:
    """Raise DataError where the folder is read-only."""
    if not place.writable:
        remedy = "let the studio's user write there, or mount it without `ro`"
        raise DataError("the data set is read-only", where=str(place.folder), remedy=remedy)


@contextlib.contextmanager
def writing_to(place: Place) -> Iterator[None]:
    """Keep other tabs and other studios from writing to the data set meanwhile.

    Raises DataError where the folder is read-only.
    """
    require_writable(place)
    descriptor = os.open(place.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # held by others for as long as they rename files
        yield
    finally:
        os.close(descriptor)
