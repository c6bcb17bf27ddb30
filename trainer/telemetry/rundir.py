"""A run's folder: the names that a run writes there, each a file or a folder, and none a link elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trainer.errors import ConfigError, Problem

LOCK_FILE = ".lock"
"""Lock file that the process holds which trains in the folder."""
CONFIG_FILE = "config.resolved.yaml"
"""The configuration of a run, with what was decided when it began."""
_PRUNED = ("checkpoints", "samples")
"""Folders whose entries a run prunes."""
# fmt: off
_FOLDERS = frozenset((
    *_PRUNED, "best", ".best.old", "lora", "model", ".model.old", "tensorboard", "wandb",
))
_FILES = frozenset((
    LOCK_FILE, "before_after.png", CONFIG_FILE, "left_out.jsonl", "log.jsonl", "metrics.jsonl", "plan.json",
    "process.json", "run.json", "samples.jsonl", "wandb.id",
))
# fmt: on
_APPENDED = frozenset((LOCK_FILE, "log.jsonl", "metrics.jsonl"))
"""Files that are opened to be written; others are replaced."""
_NEEDED = (
    dict.fromkeys(_FILES, os.F_OK)
    | dict.fromkeys(_APPENDED, os.R_OK | os.W_OK)
    | dict.fromkeys(_FOLDERS, os.R_OK | os.W_OK | os.X_OK)
)
"""Rights that a run needs on each name."""
_MOST_TOLD = 10


class HeldFolder:
    """A run's folder, by what its lock file says now: a folder of the same name may be another."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._holder = run_dir / LOCK_FILE, b""
        self._holder = self._read() or b""

    def is_gone(self) -> bool:
        """True where the lock file was removed or another run's took its place; nothing holds the folder in a
        script of one process, and then it never is.
        """
        return bool(self._holder) and self._read() != self._holder

    def is_anothers(self) -> bool:
        """True where another run's lock file took the place of this one's."""
        return bool(self._holder) and self._read() not in (None, self._holder)

    def _read(self) -> bytes | None:
        """The bytes of the file, which no run changes while it trains; None where there is none. Numbers of
        files would be no proof: some network file systems change them.
        """
        try:
            return self._path.read_bytes()
        except OSError as error:
            # a disk that does not answer now tells nothing
            return None if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE) else self._holder


def require_own_names(run_dir: Path) -> None:
    """Raise ConfigError where something that a run writes, cuts or removes is a symbolic link, a folder in
    the place of a file, or the reverse, or may not be written by this user.

    The folder itself may be a link. A folder that was unpacked to go on with it must not reach other files,
    and nothing is removed that no run has made.
    """
    here = sorted(run_dir.iterdir()) if run_dir.is_dir() else []
    written = [path for path in here if path.name in _FILES | _FOLDERS]
    pruned = [
        path
        for folder in written
        if folder.name in _PRUNED and folder.is_dir() and not folder.is_symlink()
        for path in (*folder.glob("step-*"), *folder.glob(".step-*.old"))
    ]
    links = sorted(path for path in (*written, *pruned) if path.is_symlink())
    if links:
        problems = [Problem(what=f"a link to {path.readlink()}", where=str(path)) for path in links]
        remedy = "put what they lead to in their place, or point output_dir to the other disk"
        what = "a run writes there, and does not follow links inside its folder"
        _refuse(run_dir, problems, what, remedy)
    others = [path for path in written if path.is_dir() is not (path.name in _FOLDERS)]
    if others:
        kinds = {True: "a folder, where a run has a file", False: "no folder, where a run has one"}
        problems = [Problem(what=kinds[path.is_dir()], where=str(path)) for path in others]
        remedy = "move them away, or choose another output_dir"
        what = "a run writes there, and removes nothing that it has not made"
        _refuse(run_dir, problems, what, remedy)
    closed = [path for path in written if not os.access(path, _NEEDED[path.name])]
    if closed:
        problems = [Problem(what="this user may not write it", where=str(path)) for path in closed]
        remedy = "let this user write there, or choose another output_dir"
        _refuse(run_dir, problems, "a run writes there, and another user may have begun this one", remedy)


def _refuse(run_dir: Path, problems: Sequence[Problem], what: str, remedy: str) -> NoReturn:
    """Raise ConfigError with the first of the problems, and for what reason a run does not go on."""
    more = f" and {len(problems) - _MOST_TOLD} more" if len(problems) > _MOST_TOLD else ""
    last = Problem(what=f"{what}{more}", where=str(run_dir), remedy=remedy)
    raise ConfigError([*problems[:_MOST_TOLD], last])
