"""Checks that a command can write its files, made before the work and not after it."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from trainer.errors import ConfigError


def nearest(path: Path) -> tuple[Path, str]:
    """The deepest folder of `path` that exists, and why nothing can be written into it; empty where it can.

    Asks by writing: permission bits do not tell of read-only mounts, or of what root may do.
    """
    existing = next(one for one in (path, *path.parents) if _is_folder(one))
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as failed:
        # a full disk is told by the command, with what it needs
        full = failed.errno in (errno.ENOSPC, errno.EDQUOT)
        return existing, "" if full else failed.strerror or str(failed)
    return existing, ""


def _is_folder(path: Path) -> bool:
    """True for a folder; False too where one above it may not be entered, which is then the one to name."""
    try:
        return path.is_dir()
    except PermissionError:
        return False


def require_writable(path: Path, where: str, *, folder: bool = False) -> None:
    """Raise ConfigError where the file or new folder `path`, which option `where` names, cannot be made."""
    remedy = "name a place that this user may write"
    existing, error = nearest(path.absolute().parent)
    if error:
        what = f"{existing} cannot be written: {error}"
    elif path.exists() and not (folder or path.is_file()):
        what = "it exists, and is no file"
    elif any(one.exists() and not one.is_dir() for one in path.parents):
        what = "a file stands where a folder would have to be made"
    else:
        return
    raise ConfigError(what, where=f"{where} {path}", remedy=remedy)


def require_writable_folder(path: Path, where: str) -> None:
    """Raise ConfigError where no file can be written into the folder `path`, which need not exist yet."""
    path = path.absolute()
    existing, error = nearest(path)
    if not error and existing != path and any(one.is_file() for one in (path, *path.parents)):
        error = "a file stands where a folder would have to be made"
    remedy = "name a folder that this user may write"
    if not error and existing != path:
        below = next(one for one in (path, *path.parents) if one.parent == existing)
        if below.is_symlink():  # to a disk that is not mounted, mostly
            error = f"the link {below.name} leads nowhere: to {below.readlink()}"
            remedy = "mount what it leads to, or correct the link"
    if error:
        raise ConfigError(f"{path} cannot be written: {existing}: {error}", where=where, remedy=remedy)


def require_new_folder(path: Path, where: str) -> None:
    """Raise ConfigError where the folder `path` cannot be made, or has anything in it."""
    require_writable(path, where, folder=True)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError("it is not empty", where=f"{where} {path}", remedy="name a new folder")


def require_picture(path: Path, where: str) -> None:
    """`require_writable` for a picture: raises ConfigError also where its name is not that of a PNG."""
    require_writable(path, where)
    if path.suffix.lower() != ".png":
        what, remedy = "pictures are written as PNG", f"name it {path.with_suffix('.png').name}"
        raise ConfigError(what, where=f"{where} {path}", remedy=remedy)
