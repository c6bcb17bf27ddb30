"""Frozen weights of some repeated blocks in host memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from trainer.modeling.blocks.recompute import Blocks
from trainer.modeling.storage.block_memory import Packed, Pins, pack, pages


class HostMemory:
    """Memory of this process as the home of blocks, pinned where the device is a GPU.

    `forward_only` is that of `pack`.
    """

    kept: Sequence[torch.nn.Module] = ()

    def __init__(
        self,
        blocks: Sequence[torch.nn.Module],
        *,
        pinned: bool,
        forward_only: Collection[torch.nn.Module] | None = None,
    ) -> None:
        self.blocks, self._forward_only = tuple(blocks), forward_only
        self._pins = [Pins() for _ in blocks] if pinned else []
        self._packed: list[Packed] = []

    def pack(self) -> Sequence[Packed]:
        """Take every block's weights, wherever they are, to host memory; raises HardwareError where it cannot
        be pinned. What they were packed into before is freed.
        """
        for number, block in enumerate(self.blocks):
            packed = pack(block, pages, forward_only=self._forward_only)
            if self._pins:
                self._pins[number].replace([packed.bytes])
            self._packed[number : number + 1] = [packed]
            packed.point()
        return self._packed

    def unpack(self) -> None:
        """Let every block's tensors be those in host memory."""
        for packed in self._packed:
            packed.point()


def spread(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Places of `count` blocks in stacks of these lengths, one stack after the other.

    Those of a stack lie as far from each other as they can: a block is copied while all blocks between the
    one before and it compute.
    """
    chosen = []
    for length in lengths:
        part = min(length, count)
        chosen.append([(2 * place + 1) * length // (2 * part) for place in range(part)])
        count -= part
    return chosen


def spread_blocks(blocks: Blocks, count: int) -> list[str]:
    """Names of the `count` blocks that are to lie elsewhere, in the order of `blocks`.

    The longest stack comes first, its blocks evenly spread (see `trainer.planning.shapes.geometry`): small
    ones, of which pages take little.
    """
    stacks: dict[str, list[str]] = {}
    for name in blocks:
        stacks.setdefault(name.rpartition(".")[0], []).append(name)
    longest = [stacks[name] for name in sorted(stacks, key=lambda name: (-len(stacks[name]), name))]
    assert count <= sum(map(len, longest)), f"{count} blocks of {sum(map(len, longest))} are to lie elsewhere"
    chosen = spread([len(stack) for stack in longest], count)
    names = {stack[place] for stack, places in zip(longest, chosen, strict=True) for place in places}
    return [name for name in blocks if name in names]
