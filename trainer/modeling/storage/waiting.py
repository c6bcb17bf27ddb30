"""The choice of blocks that wait in host memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence


def waiting(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Places of the blocks that wait in host memory in stacks of these lengths, one stack after the other.

    Those of a stack lie as far from each other as they can: a block is copied while all blocks between the
    one before and it compute.
    """
    chosen = []
    for length in lengths:
        part = min(length, count)
        chosen.append([(2 * place + 1) * length // (2 * part) for place in range(part)])
        count -= part
    return chosen
