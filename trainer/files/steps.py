"""Names of what is kept of a step: folders `step-000500`, and pictures of that stem.

Numbers have six digits and, from a million on, more: sorted as texts such names are out of order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"step-(\d{6,})(?:\.png)?")


def step_in(path: Path) -> int | None:
    """The step that a file or folder is named after; None where it has another name."""
    found = _NAME.fullmatch(path.name)
    return None if found is None else int(found[1])


def by_step(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    """Paths that are named after a step, each with it, the earliest first; without the others."""
    return sorted((step, path) for path in paths if (step := step_in(path)) is not None)
