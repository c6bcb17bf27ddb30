"""Floor 4: LoRA targets as a pattern, the same for the planner and for training. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence


def suffix_pattern(suffixes: Sequence[str]) -> str:
    """Regular expression over whole module names that end with one of `suffixes`."""
    return rf"(?:.*\.)?(?:{'|'.join(re.escape(suffix) for suffix in suffixes)})"
