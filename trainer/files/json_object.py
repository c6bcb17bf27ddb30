"""Small JSON files that processes leave each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def read_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """The object of a JSON file, of which so many bytes are read; an empty one where the file is absent,
    damaged, longer or no object: it is another process's, or an older version's.
    """
    try:
        with path.open("rb") as file:
            raw = json.loads(file.read(most_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def is_finite(value: float) -> bool:
    """True for a number that a float can hold: JSON has NaN, Infinity and whole numbers of any length."""
    return abs(value) <= sys.float_info.max
