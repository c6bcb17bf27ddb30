"""Atomic writes: a file is the old or the new one, never half of it; a full disk is reported as such."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trainer.errors import NoSpaceError, StorageError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FAILING = "look at the kernel's log and the disk or its server, then start again to resume"
_REFUSED = "let this user write there, or choose another folder, then start again to resume"
_REMEDIES: dict[int, str] = {
    errno.EIO: _FAILING,
    errno.EREMOTEIO: _FAILING,
    errno.ENXIO: _FAILING,
    errno.ENODEV: _FAILING,
    errno.ETIMEDOUT: _FAILING,
    errno.ENOTCONN: _FAILING,
    errno.ESTALE: "mount the folder again: its server forgot it; then start again to resume",
    errno.EROFS: "the disk takes no more writes, which file systems do after an error: " + _FAILING,
    errno.EFBIG: "raise the limit of a file's size (`ulimit -f`), or choose a file system with larger files",
    errno.EACCES: _REFUSED,
    errno.EPERM: _REFUSED,
}
"""Errors of a disk that is not full, those of a wrong path apart -> what to do."""
_IN_THE_WAY: dict[int, str] = {
    errno.EISDIR: "a folder stands where this file belongs: move it away, then start again to resume",
    errno.ENOTDIR: "a file stands where a folder belongs: move it away, then start again to resume",
}
"""The same for what somebody else put in the place of what is written."""
_GIB = 1024**3
_PIECE_BYTES = 1 << 24
_OLD = ".old"
_TRIES = 10
_IN_USE = frozenset({errno.ENOTEMPTY, errno.EBUSY})


@contextlib.contextmanager
def no_space_told(path: Path) -> Iterator[None]:
    """Turn a disk's errors inside the block into StorageError that names `path`: NoSpaceError where it is
    full or a quota is spent. So are a folder in a file's place and the reverse; other errors keep their type.
    """
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        if code in _FULL:
            raise NoSpaceError(
                f"{os.strerror(code)} while writing it{_free_text(path)}",
                where=str(path),
                remedy="free space on that disk, or choose another one; files written earlier are untouched",
            ) from error
        remedy = _REMEDIES.get(code) or _IN_THE_WAY.get(code)
        if remedy is None:
            raise
        what = f"{os.strerror(code)} while writing it; files written earlier are untouched"
        raise StorageError(what, where=str(path), remedy=remedy) from error


@contextlib.contextmanager
def reading_told(path: Path) -> Iterator[None]:
    """Turn a failing disk's errors inside the block into StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        if code not in _REMEDIES:
            raise
        remedy = "let this user read it" if _REMEDIES[code] is _REFUSED else _REMEDIES[code]
        raise StorageError(f"{os.strerror(code)} while reading it", where=str(path), remedy=remedy) from error


def copy_file(source: Path, target: Path) -> None:
    """Copy the bytes of `source`, or of what it links to, to `target`, and sync them.

    Raises StorageError that names the file which its disk did not give or take.
    """
    with reading_told(source):
        file = source.open("rb")
    with file, no_space_told(target), target.open("wb") as copy:
        while True:
            with reading_told(source):
                piece = file.read(_PIECE_BYTES)
            if not piece:
                break
            copy.write(piece)
        copy.flush()
        os.fsync(copy.fileno())


@contextlib.contextmanager
def writing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Give a binary file that becomes `path` when the block ends, and vanishes when it raises.

    With `sync` the bytes and the name are on the disk before this returns; without it only other processes
    are sure to see a whole file, which is enough for status files. Raises StorageError.
    """
    # Two writers of one path must not share a temporary file: numbers of processes and threads are equal in
    # two containers that share a folder.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with no_space_told(path):
        try:
            with temporary.open("wb") as file:
                yield file
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # nothing to remove once it was renamed
        if sync:
            sync_directory(path.parent)


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Write `text` to `path` as UTF-8, so that no reader and no crash ever sees a part of it."""
    with writing(path, sync=sync) as file:
        file.write(text.encode())


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder that takes the place of `target` when the block ends, and vanishes when it raises.

    The older folder is kept aside until the new one is in its place: one that an interrupted call left aside
    comes back first, and `kept_aside` finds it until then. Names are on the disk before it goes; bytes are
    for the block to sync. Raises StorageError.
    """
    temporary, aside = names_beside(target)
    put_back(target)
    for left in (temporary, aside):
        _clear(left)
    try:
        with no_space_told(target):
            temporary.mkdir(parents=True)
        yield temporary
        with no_space_told(target):
            for folder, _, _ in os.walk(temporary):
                sync_directory(Path(folder))
            if target.is_dir():
                target.rename(aside)
            temporary.replace(target)
            sync_directory(target.parent)
            remove_folder(aside)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if aside.is_dir() and not target.exists():
            aside.rename(target)


def names_beside(target: Path) -> tuple[Path, Path]:
    """Where `whole_folder` makes the new folder, and where the older one waits; it removes what is there.

    The second is hidden: nobody's own copy, and nothing that a reader of the folder takes for a result.
    """
    return target.with_name(f"{target.name}.tmp"), target.with_name(f".{target.name}{_OLD}")


def _clear(left: Path) -> None:
    """Remove what a killed `whole_folder` left. Raises StorageError where it stays: before any work."""
    with contextlib.suppress(OSError):  # told below
        if left.is_symlink():
            left.unlink()
    shutil.rmtree(left, ignore_errors=True)
    if os.path.lexists(left):
        what, remedy = "what a killed start left here cannot be removed", "remove it or move it away"
        raise StorageError(what, where=str(left), remedy=f"{remedy}, then start again to resume")


def kept_aside(folder: Path) -> dict[Path, Path]:
    """Folders in `folder` that an interrupted `whole_folder` was replacing, each with where its older one
    waits for `put_back`.
    """
    waiting = [path for path in sorted(folder.glob(f".?*{_OLD}")) if path.is_dir()]
    return {path.with_name(path.name[1:].removesuffix(_OLD)): path for path in waiting}


def put_back(target: Path) -> bool:
    """Give the folder that an interrupted `whole_folder` kept aside its name again, or remove it where
    `target` was replaced whole. True where it came back. Raises StorageError.
    """
    _, aside = names_beside(target)
    if not aside.is_dir():
        return False
    with no_space_told(target):
        if target.exists():
            remove_folder(aside)
            return False
        aside.rename(target)
        sync_directory(target.parent)
        return True


def remove_folder(folder: Path) -> bool:
    """Remove a folder that need not be there; False where some of it stays for a later call: of a network's
    file system that which a process has open, else files that come while it is removed. Of a link to a folder
    that somebody moved the link alone goes. Raises StorageError.
    """
    with no_space_told(folder):
        if folder.is_symlink():
            folder.unlink(missing_ok=True)
            return True
        for _ in range(_TRIES):
            try:
                shutil.rmtree(folder)
            except FileNotFoundError:  # it, or a file in it: somebody else removes it as well
                if not folder.exists():
                    return True
            except OSError as error:
                if error.errno not in _IN_USE:
                    raise
                return False
    return not folder.exists()


def unused_name(path: Path) -> Path:
    """`path`, or `path` with the first free number: a file that is kept aside never replaces another."""
    found, number = path, 2
    while found.exists() or found.is_symlink():
        found = path.with_name(f"{path.name}-{number}")
        number += 1
    return found


def sync_directory(path: Path) -> None:
    """Make names created, renamed or removed in the folder `path` survive a power cut, where its file system
    can: some of networks and of user space sync files alone.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what cannot be synced: see fsync(2)
            raise
    finally:
        os.close(descriptor)


def _free_text(path: Path) -> str:
    """The free space of the nearest existing folder above `path`, as ` (0.1 GiB free)`."""
    for folder in path.parents:
        if folder.is_dir():
            return f" ({shutil.disk_usage(folder).free / _GIB:.1f} GiB free)"
    return ""
