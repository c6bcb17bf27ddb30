"""A job's own files in the shared runtime folder, removed when it ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.telemetry.locks import is_held

_NAME = re.compile(r"(train|cache|sample|verify)-[a-z0-9_]{8}")
# between its making and its lock a folder looks like one that was left
_LEFT_AFTER_SECONDS = 60.0


@contextlib.contextmanager
def job_folder(shared: Path, mode: str, name: str = "") -> Iterator[Path]:
    """A folder that only this job uses: a second command must not change what the first one is about to read.

    It is locked as long as this process lives. Those that killed processes left behind are removed first.
    With a `name` of eight letters it is `named_folder`, which other processes find and see locked.
    """
    _remove_left(shared)
    with tempfile.TemporaryDirectory(prefix=f"{mode}-", dir=shared, ignore_cleanup_errors=True) as made:
        folder = Path(made)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nothing is removed there either
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if name:
                shutil.rmtree(named_folder(shared, mode, name), ignore_errors=True)  # a killed start's
                folder = folder.rename(named_folder(shared, mode, name))
            yield folder
        finally:
            if name:
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def named_folder(shared: Path, mode: str, name: str) -> Path:
    """The `job_folder` of that name; it need not exist."""
    return shared / f"{mode}-{name}"


def _remove_left(shared: Path) -> None:
    for path in shared.iterdir():
        with contextlib.suppress(OSError):  # gone by now, or somebody else's
            old = time.time() - path.lstat().st_mtime > _LEFT_AFTER_SECONDS
            if _NAME.fullmatch(path.name) and old and is_held(path) is False:
                shutil.rmtree(path, ignore_errors=True)
