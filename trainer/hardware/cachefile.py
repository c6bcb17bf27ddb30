"""Floor 2: small JSON files in the cache folder; what they hold can be had again, a broken one is empty."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def read_entries(path: Path) -> dict[str, Any]:
    """The file's object by key; empty where the file is missing or is not a JSON object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_entries(path: Path, entries: dict[str, Any]) -> bool:
    """Replace the file in one step; False where the folder cannot be written: a cache is no need."""
    # the process id keeps two runs that write at once from sharing one temporary file
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True
