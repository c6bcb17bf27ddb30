"""Files below the studio's roots: a name leads nowhere else, and what is shown as a picture is one."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from trainer.ui.studio import UnknownIdError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MOST_PIXELS = 100_000_000
"""Pixels of a picture that is uploaded or shown."""


@contextlib.contextmanager
def folder_below(root: Path, path: Path) -> Iterator[Path]:
    """Give `path` through the descriptor of its folder below `root`, which no link on the way, now or
    meanwhile, leads elsewhere. Raises OSError, and ValueError where `path` is not below.
    """
    descriptor = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    try:
        *folders, name = path.relative_to(root).parts
        for folder in folders:
            inner = os.open(folder, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield Path(f"/proc/self/fd/{descriptor}", name)
    finally:
        os.close(descriptor)


def open_no_link(path: Path) -> BinaryIO:
    """A file for reading that is no link itself. Raises OSError."""
    # by an opener, as `fdopen` leaves the descriptor of a folder open
    return open(path, "rb", opener=lambda name, _: os.open(name, _FILE))


def open_below(root: Path, path: Path) -> BinaryIO:
    """The file `path` below `root`, opened step by step so that no link is followed on the way.

    Raises UnknownIdError where it is not there, or a link is.
    """
    try:
        with folder_below(root, path) as real:
            return open_no_link(real)
    except (OSError, ValueError) as error:
        raise UnknownIdError(str(path)) from error


def tail(root: Path, path: Path, most_bytes: int) -> list[str]:
    """The last whole lines of a text file below `root`, within `most_bytes`; none where it is missing."""
    try:
        with open_below(root, path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            text = file.read(most_bytes)
    except UnknownIdError:
        return []
    lines = text.decode(errors="replace").split("\n")
    return lines[1 if size > most_bytes else 0 : -1]


@functools.lru_cache(maxsize=256)
def webp(root: Path, path: Path, changed_ns: int, side: int) -> bytes:
    """The PNG `path` below `root` as a WebP of at most `side` pixels, without its texts: what is shown is
    always a picture. `changed_ns` keeps an older one apart. Raises UnknownIdError for what is none.
    """
    with open_below(root, path) as file:
        try:
            with Image.open(file, formats=("PNG",)) as picture:
                if picture.width * picture.height > MOST_PIXELS:
                    raise UnknownIdError(str(path))
                plain = picture.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UnknownIdError(str(path)) from error
    return as_webp(plain, side)


def as_webp(picture: Image.Image, side: int) -> bytes:
    """WebP of a decoded picture, no side longer than `side` pixels, without texts, EXIF and profile."""
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    plain, result = Image.new("RGB", picture.size), io.BytesIO()
    plain.paste(picture)
    plain.save(result, "WEBP", quality=85)
    return result.getvalue()
