"""Frozen weights of some repeated blocks in host memory, copied to the device just before their use.

Two buffers on the device hold one block's frozen tensors each. While a block computes, the one that is needed
next is copied into the other buffer on a stream of its own; nothing is ever copied back. Adapters stay on the
device, and so does the state of the optimizer. A block's weights are needed in its forward pass, and in
backward where the block is recomputed: activations of these blocks are never kept.

A block's tensors always are views of a buffer, though of another block's bytes while it does not compute.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from trainer.modeling.blocks.recompute import Blocks, Recomputed, give_base, recomputed
from trainer.modeling.storage.block_memory import Packed, pack, pages, pin, point, unpin, views

Pass = Literal["forward", "backward", "prediction"]
_BUFFERS = 2


class _Waiting(Recomputed):
    """A block whose weights wait in host memory."""

    swapped: Swapped
    number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own call with its weights on the device; it is recomputed in backward."""
        # not the base class' call, which would recompute without the weights
        call = super(Recomputed, self).__call__
        if not torch.is_grad_enabled():
            self.swapped.stage(self.number, "prediction")
            return call(*args, **kwargs)
        return recomputed(
            call,
            args,
            kwargs,
            draws=self.draws,
            contexts=lambda: (self._staged("forward"), self._staged("backward")),
        )

    @contextmanager
    def _staged(self, turn: Pass) -> Iterator[None]:
        """The weights are on the device for the forward pass, or for the recomputation in backward."""
        self.swapped.stage(self.number, turn)
        yield


class Swapped:
    """The blocks that wait in host memory, in the order in which they compute."""

    def __init__(self, blocks: Sequence[torch.nn.Module], device: str) -> None:
        self.blocks = tuple(blocks)
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._packed: list[Packed] = []
        self._pinned: list[torch.Tensor] = []
        # memory must not be freed while it is pinned; a process that ends unpins it anyway
        weakref.finalize(self, _unpin, self._pinned).atexit = False
        self._buffers: list[torch.Tensor] = []
        self._views: list[list[list[torch.Tensor]]] = []
        self.pack()

    @property
    def number(self) -> int:
        """Blocks that wait."""
        return len(self.blocks)

    @property
    def host_bytes(self) -> int:
        """Host memory that all of them take."""
        return sum(packed.bytes.numel() for packed in self._packed)

    @property
    def device_bytes(self) -> int:
        """Device memory of the buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def pack(self) -> None:
        """Take every block's frozen tensors, wherever they are, into host memory that the device can read.

        Call it again after `to_host` and a change of the tensors; what the blocks were packed into is freed.
        """
        self._buffers, self._views = [], []
        for number, block in enumerate(self.blocks):
            packed, this = pack(block, pages), slice(number, number + 1)
            if self._stream is not None:
                _unpin(self._pinned[this])
                pin(packed.bytes, remedy="features.block_swap: 0 needs none")
                self._pinned[this] = [packed.bytes]
            self._packed[this] = [packed]
            point(packed, views(packed, packed.bytes))
        largest = max(packed.bytes.numel() for packed in self._packed)
        self._buffers = [
            torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() for _ in range(_BUFFERS)] if self._stream is not None else []
        self._held: list[int | None] = [None] * _BUFFERS
        self._latest = 0
        self._views = [[views(packed, buffer) for buffer in self._buffers] for packed in self._packed]
        for number in range(self.number):
            point(self._packed[number], self._views[number][0])

    def to_host(self) -> None:
        """Let every block's tensors be those in host memory, to change them; `pack` must follow."""
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        for packed in self._packed:
            point(packed, views(packed, packed.bytes))

    def stage(self, number: int, turn: Pass) -> None:
        """Put a block's weights on the device for the next kernels, and begin to copy the following block's.

        Everything that reads the weights of the block before must be enqueued by now, and is: autograd works
        through blocks in the reverse of their order, one after another.
        """
        if number in self._held:
            slot = self._held.index(number)
        else:
            slot = 1 - self._latest
            self._copy(number, slot)
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._copied[slot])
        point(self._packed[number], self._views[number][slot])
        self._latest = slot
        following = self._following(number, turn)
        if following is not None and following not in self._held:
            self._copy(following, 1 - slot)

    def _following(self, number: int, turn: Pass) -> int | None:
        """The block that is needed next; backward begins with the last two, which are on the device."""
        if turn == "backward":
            return number - 1 if number > 0 else None
        if number + 1 < self.number:
            return number + 1
        return 0 if turn == "prediction" else None

    def _copy(self, number: int, slot: int) -> None:
        """Begin to fill a buffer, after everything that was enqueued by now."""
        self._held[slot] = number
        source = self._packed[number].bytes
        target = self._buffers[slot][: source.numel()]
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._copied[slot].record(self._stream)


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


def waiting_blocks(blocks: Blocks, count: int) -> list[str]:
    """Names of the `count` blocks that wait in host memory, in the order of `blocks`.

    The longest stack comes first, its blocks evenly spread (see `trainer.planning.shapes.geometry`): small
    ones, of which two buffers take little.
    """
    stacks: dict[str, list[str]] = {}
    for name in blocks:
        stacks.setdefault(name.rpartition(".")[0], []).append(name)
    longest = [stacks[name] for name in sorted(stacks, key=lambda name: (-len(stacks[name]), name))]
    assert count <= sum(map(len, longest)), f"{count} blocks of {sum(map(len, longest))} are to wait"
    chosen = waiting([len(stack) for stack in longest], count)
    names = {stack[place] for stack, places in zip(longest, chosen, strict=True) for place in places}
    return [name for name in blocks if name in names]


def swap_blocks(blocks: Blocks, count: int, *, device: str) -> Swapped:
    """Keep the frozen tensors of `waiting_blocks` in host memory from now on, wherever they are.

    Adapters may be there already or come later. Raises HardwareError where host memory cannot be pinned.
    """
    swapped = Swapped([blocks[name] for name in waiting_blocks(blocks, count)], device)
    for number, block in enumerate(swapped.blocks):
        give_base(block, _Waiting)
        assert isinstance(block, _Waiting)
        block.swapped, block.number = swapped, number
    return swapped


def _unpin(memories: Sequence[torch.Tensor]) -> None:
    if memories:
        torch.cuda.synchronize()
    for memory in memories:
        unpin(memory)
