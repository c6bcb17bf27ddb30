"""Tiny base models with random weights, one for each family: what contract tests walk."""

from __future__ import annotations

from pathlib import Path

from tests import random_bases

TINY_MODELS: tuple[str, ...] = tuple(sorted(random_bases.FAMILIES))
"""Families that have a tiny base; a house test holds it equal to the table of families."""


def build_tiny(family: str, folder: Path) -> Path:
    """Write the family's tiny base into `folder` and return it: equal bytes every time."""
    random_bases.build(family, "tiny", folder)
    return folder
