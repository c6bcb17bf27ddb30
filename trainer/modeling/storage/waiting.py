"""Which blocks wait in host memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence


def waiting(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Which blocks of stacks of these lengths wait in host memory: all of one stack before the next.

    Those of a stack lie as far from each other as they can: a block is copied while all blocks between the
    one before and it compute.
    """
    chosen = []
    for length in lengths:
        part = min(length, count)
        chosen.append([(2 * place + 1) * length // (2 * part) for place in range(part)])
        count -= part
    return chosen
