"""Counts with their noun in the singular or plural."""

from __future__ import annotations


def numbered(count: float, one: str, many: str = "") -> str:
    """`1 step`, `3 steps`, `0.5 epochs`: a count, whole or not, with what there is of it.

    `one` and `many` may go on behind the noun (`layer is`, `layers are`); without `many` an s is added.
    """
    return f"{count:.12g} {one if count == 1 else many or f'{one}s'}"
