"""The mounts of this system, and which of them a path lies on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One mounted file system or folder."""

    path: str
    root: str
    """The folder on its own file system: on most hosts the path that was mounted."""
    kind: str
    """overlay, ext4, tmpfs, ..."""
    read_only: bool


def parse_mounts(mountinfo: str) -> tuple[Mount, ...]:
    """Mounts from the text of /proc/self/mountinfo, in their order: a later one hides an earlier one."""
    mounts = []
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 6:
            continue
        root, path, options = _unescaped(fields[3]), _unescaped(fields[4]), fields[5].split(",")
        kind, *_, super_options = after.split(" ")
        read_only = "ro" in options or "ro" in super_options.split(",")
        mounts.append(Mount(path=path, root=root, kind=kind, read_only=read_only))
    return tuple(mounts)


def holding(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that a path lies on; None where no root is listed."""
    above = [mount for mount in mounts if is_below(path, mount.path)]
    # of two on one path the later one
    return max(reversed(above), key=lambda mount: len(mount.path), default=None)


def is_below(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(f"{folder}/")


def _unescaped(text: str) -> str:
    r"""Blanks and backslashes are written as \040 and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
