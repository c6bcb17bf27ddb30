"""Folders that the studio shows, and the ids that stand for what lies in them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SLUG = re.compile(r"[^A-Za-z0-9]+")
_MOST_LETTERS = 40


class UnknownIdError(Exception):
    """An id of a URL that nothing in the studio's folders has: it was removed, or never was."""


@dataclass(frozen=True, kw_only=True)
class Studio:
    """Where the studio keeps its own state, and the roots below which everything lies that it shows.

    All paths are absolute. Nothing outside of them is read or written for a request.
    """

    folder: Path
    """The studio's own: token, sessions, lock, trash, settings; only this user may look into it."""
    runs: Path
    """Root below which run folders lie."""
    data: Path
    """Root of data sets."""
    models: Path
    """Root of base models."""
    runtime: Path
    """Runtime folder of runs that this user starts on a command line; see `environment.runtime_dir`."""
    starts_runs: bool = True
    """Whether runs are added to a queue here; where not, they are started elsewhere, from files."""


def identifier(root: Path, path: Path) -> str:
    """The id of a folder or file below `root` in URLs: its name in plain letters and 8 digits of its path's
    hash. It leads to nothing by itself: `found_by_id` compares it with what is there.
    """
    relative = path.relative_to(root).as_posix() or "."
    digest = hashlib.sha256(relative.encode(errors="surrogateescape")).hexdigest()[:8]
    slug = _SLUG.sub("-", path.name).strip("-")[:_MOST_LETTERS]
    return f"{slug}-{digest}" if slug else digest


def found_by_id(root: Path, given: str, candidates: Iterable[Path]) -> Path:
    """The one of `candidates`, all below `root`, whose `identifier` is `given`. Raises UnknownIdError."""
    for path in candidates:
        if identifier(root, path) == given:
            return path
    raise UnknownIdError(given)
