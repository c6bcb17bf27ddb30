"""Frozen weights of repeated blocks that lie elsewhere, and are copied to the device just before their use.

Elsewhere is their home: host memory, or the memory of another GPU. Frozen weights never change, so nothing is
ever copied back, and nobody has to be asked. While a block computes, the one that is needed next is copied on
a stream of its own. A block's weights are needed in its forward pass and in its backward pass; adapters stay
on the device.

A block's frozen tensors are views of one storage on the device, the block's page, which is empty while the
block does not compute: its memory goes back to the allocator. What autograd keeps for backward, views of the
weights among it, are views of the same storage, and find the weights there again. What reads a weight that is
not staged finds a storage without bytes, and no other block's weights: torch has an error for some operators,
and others end the process. So weights of such blocks are read by calls of their blocks alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from trainer.modeling.blocks.recompute import Recomputed, give_base, recomputed
from trainer.modeling.storage.block_memory import Packed, Part

Pass = Literal["forward", "backward", "prediction"]


class Home(Protocol):
    """The place of the frozen weights of some blocks between their uses."""

    @property
    def blocks(self) -> Sequence[torch.nn.Module]:
        """The blocks that lie elsewhere, in the order in which they compute."""

    @property
    def kept(self) -> Sequence[torch.nn.Module]:
        """Blocks that lie on the device for the sake of others: their weights must stay where they are."""

    def pack(self) -> Sequence[Packed]:
        """Take the weights of all blocks home; the bytes of each of `blocks`, which the device can read."""

    def unpack(self) -> None:
        """Let the tensors of all blocks be some that layers can be joined in; `pack` must follow."""


class _Page:
    """The memory on the device of a part of a block's frozen tensors."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self.use, self._source = part.use, part.bytes
        self._whole = torch.empty(part.bytes.numel(), dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._is_filled = False
        part.point(self._whole)
        self._whole.untyped_storage().resize_(0)

    def fill(self, stream: torch.cuda.Stream | None) -> None:
        """Begin to copy the block's bytes, after everything that was enqueued by now."""
        if self._is_filled:
            return
        self._whole.untyped_storage().resize_(self._source.numel())
        self._is_filled = True
        if stream is None or self._copied is None:
            self._whole.copy_(self._source)
            return
        # the memory may still be in use by what was enqueued before it was given back
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._whole.copy_(self._source, non_blocking=True)
            self._copied.record(stream)

    def wait(self) -> None:
        """Have all kernels from now on wait for the copy."""
        if self._copied is not None and self._is_filled:
            torch.cuda.current_stream().wait_event(self._copied)

    def empty(self) -> None:
        """Give the memory back to the allocator, for kernels that are enqueued from now on."""
        if self._is_filled:
            self.wait()
            self._whole.untyped_storage().resize_(0)
            self._is_filled = False


class Staged:
    """The blocks whose frozen weights have another home than the device, in the order of their computation.

    `ahead` is the number of blocks whose weights are copied before their turn: so many and one are on the
    device at a time. Adapters may be there already or come later.

    At the end of a pass the blocks of the next one are copied, unless each pass is `closed`: then nothing is
    begun for the next one, and `empty` after a backward pass leaves nothing on the device. A CUDA graph must
    be so, which finds the memory of its own pages each time it is replayed, and no other.
    """

    def __init__(self, home: Home, device: str, *, ahead: int = 1, closed: bool = False) -> None:
        self.home, self.ahead, self.closed = home, ahead, closed
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._pages: list[list[_Page]] = []
        """Of each block."""
        self._window: list[_Page] = []
        self._bytes: list[int] = []
        self.pack()
        for number, block in enumerate(home.blocks):
            give_base(block, _StagedBlock)
            assert isinstance(block, _StagedBlock)
            block.staged, block.number, block.recomputes = self, number, False

    @property
    def blocks(self) -> Sequence[torch.nn.Module]:
        """The blocks, in the order in which they compute."""
        return self.home.blocks

    @property
    def home_bytes(self) -> int:
        """Memory that they take at home."""
        return sum(self._bytes)

    @property
    def device_bytes(self) -> int:
        """The most memory of this device that they take."""
        return min(self.ahead + 1, len(self._bytes)) * max(self._bytes, default=0)

    def pack(self) -> None:
        """Take every block's weights home; again after `unpack` and a change of the tensors."""
        packed = self.home.pack()
        self._bytes = [one.bytes.numel() for one in packed]
        self._pages = [[_Page(part, self._device) for part in one.parts] for one in packed]
        self._window = []

    def unpack(self) -> None:
        """Let every block's tensors be some that layers can be joined in; `pack` must follow."""
        self.empty()
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        self._pages = []
        self.home.unpack()

    def empty(self) -> None:
        """Give back the memory of all pages."""
        for page in self._window:
            page.empty()
        self._window = []

    def stage(self, number: int, turn: Pass) -> None:
        """Put a block's weights on the device for the next kernels, and begin to copy those needed after it.

        Everything that reads the weights of blocks that are not needed soon must be enqueued by now, and is:
        autograd works through blocks in the reverse of their order, one after another.
        """
        self._copy(number, turn)
        for page in self._needed(number, turn):
            page.wait()

    def begin(self) -> None:
        """Begin to copy what the first blocks of a pass through the whole model read, before their turn.

        Where passes are `closed` nobody else does: the first block would wait for all of its copy.
        """
        self._copy(0, "forward" if torch.is_grad_enabled() else "prediction")

    def _copy(self, number: int, turn: Pass) -> None:
        """Begin to copy a block's pages and those needed after it, and give back the memory of all others."""
        window = self._next(number, turn)
        for page in self._window:
            if page not in window:
                page.empty()
        self._window = window
        for page in window:
            page.fill(self._stream)

    def _needed(self, number: int, turn: Pass) -> list[_Page]:
        """The pages of a block that a pass reads."""
        other = "forward" if turn == "backward" else "backward"
        return [page for page in self._pages[number] if page.use != other]

    def _next(self, number: int, turn: Pass) -> list[_Page]:
        """Pages of the block and of those that are needed next, as many blocks as may be on the device."""
        most, blocks = min(self.ahead + 1, len(self._pages)), set[int]()
        found: list[_Page] = []
        for one, then in _order(number, len(self._pages), turn, closed=self.closed):
            blocks.add(one)
            if len(blocks) > most:
                break
            found += [page for page in self._needed(one, then) if page not in found]
        return found


def _order(number: int, count: int, turn: Pass, *, closed: bool) -> Iterator[tuple[int, Pass]]:
    """Numbers of blocks from `number` on in the order of their next use, and the passes.

    After the last block's forward pass comes its backward pass; after the first one's, and after a
    prediction, the next forward pass, or where passes are `closed` none.
    """
    if turn == "prediction":
        yield from ((one % count, turn) for one in range(number, count if closed else number + count))
        return
    if turn == "forward":
        yield from ((one, turn) for one in range(number, count))
    last = count - 1 if turn == "forward" else number
    yield from ((one, "backward") for one in range(last, -1, -1))
    if not closed:
        yield from ((one, "forward") for one in range(count))


class _StagedBlock(Recomputed):
    """A block whose weights are staged around its passes."""

    staged: Staged
    number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own call with its weights on the device, in the backward pass too."""
        # not the base class' call, which would recompute without the weights
        call, staged, number = super(Recomputed, self).__call__, self.staged, self.number
        if not torch.is_grad_enabled():
            staged.stage(number, "prediction")
            return call(*args, **kwargs)
        staged.stage(number, "forward")
        if self.recomputes:
            output = recomputed(call, args, kwargs, draws=self.draws)
        else:
            output = call(*args, **kwargs)
        read = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
        if read:
            # autograd takes the latest node that is ready: all of the block behind have run by the first one
            register_multi_grad_hook(read, lambda _: staged.stage(number, "backward"), mode="any")
        return output
