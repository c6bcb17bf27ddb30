"""Small JSON files in the cache folder: their values can be measured again, and a broken file is empty."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import StorageError
from trainer.files import atomic


def read_entries(path: Path) -> dict[str, Any]:
    """The file's object by key; empty where the file is missing or is not a JSON object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def update_entries(path: Path, change: Callable[[dict[str, Any]], None]) -> bool:
    """Read, change and replace the file under a lock, so that two processes lose nothing of each other's.

    False where the folder cannot be written. The lock is a file of its own, which stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # some network file systems have no locks: the last writer wins, and the other measures again
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            entries = read_entries(path)
            change(entries)
            return write_entries(path, entries)
        finally:
            os.close(lock)
    except OSError:
        return False


def write_entries(path: Path, entries: dict[str, Any]) -> bool:
    """Replace the file in one step; False where the folder cannot be written: no run needs a cache."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps(entries, indent=2, sort_keys=True) + "\n", sync=False)
    except (OSError, StorageError):
        return False
    return True
