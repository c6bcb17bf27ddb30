"""Frozen weights of repeated blocks that the processes which train together share, each of which keeps some.

Block number k of those that are shared belongs to member k mod N of a group of N processes. Its owner
computes with it where it lies; the others copy it from there when its turn comes. Weights that never change
need no partner: nobody waits for anybody, whatever the others do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer.modeling.storage.block_memory import (
    Packed,
    Part,
    Pins,
    Place,
    Use,
    frozen,
    pack,
    replace_values,
    without_values,
)
from trainer.modeling.storage.shared_memory import Offer, open_offer, share


class Gather(Protocol):
    """Gives every process the value of each, in the order of the group; all must call it together."""

    def __call__(self, value: Any) -> list[Any]:
        """The values."""


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Place of one tensor in an owner's memory."""

    name: str
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


@dataclass(frozen=True, kw_only=True)
class _Offered:
    """A block that its owner has packed."""

    offer: Offer
    parts: tuple[tuple[Use, int, tuple[_Layout, ...]], ...]
    """Of each part in turn: its use, its bytes, and its tensors."""


class PeerMemory:
    """The memory of the members of a group as the home of blocks, each of which lies with one of them.

    It is memory of their devices, where its owner uses a block as it lies; or with `on_host` memory of the
    host, of which there is one copy for all, and every member copies every block. Tensors of the blocks of
    others need no values when this is made: they may be on the meta device.
    """

    def __init__(
        self,
        blocks: Sequence[torch.nn.Module],
        *,
        member: int,
        size: int,
        gather: Gather,
        device: str,
        on_host: bool = False,
        by_use: bool = False,
    ) -> None:
        self._by_use = by_use
        self._shared, self._member, self._size = tuple(blocks), member, size
        self._gather, self._device = gather, torch.device(device)
        self._on_host = on_host
        self._memory = torch.device("cpu") if on_host else self._device
        self._pins = Pins() if on_host and self._device.type == "cuda" else None
        self._own: dict[int, tuple[_Offered, Packed]] = {}
        resident = () if on_host else self._numbers(own=True)
        self.kept = tuple(blocks[number] for number in resident)
        self.blocks = tuple(block for number, block in enumerate(blocks) if number not in resident)

    @property
    def own_bytes(self) -> int:
        """Memory that the group's other members read of this one."""
        return sum(offered.offer.count for offered, _ in self._own.values())

    def _numbers(self, *, own: bool) -> list[int]:
        """Numbers of the blocks that are this member's own, or that are not."""
        return [number for number in range(len(self._shared)) if (number % self._size == self._member) == own]

    def pack(self) -> Sequence[Packed]:
        """Move the own blocks to memory that others can read, and open that of the others' blocks."""
        for number in self._numbers(own=True):
            self._own[number] = self._shared_block(self._shared[number])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        every: dict[int, _Offered] = {}
        for offers in self._gather({number: offered for number, (offered, _) in self._own.items()}):
            every.update(offers)
        found = {
            number: self._opened(self._shared[number], every[number]) for number in self._numbers(own=False)
        }
        if self._on_host:
            found |= {number: packed for number, (_, packed) in self._own.items()}
        if self._pins is not None:
            self._pins.replace([packed.bytes for packed in found.values()])
        self._gather(None)  # an owner may end what it has offered only when all have opened it
        return [found[number] for number in sorted(found)]

    def unpack(self) -> None:
        """Let the tensors of the others' blocks have no values; all members must call it together."""
        for number in self._numbers(own=False):
            for _, tensor in frozen(self._shared[number]):
                replace_values(tensor, without_values(tensor))
        for _, packed in self._own.values():
            packed.point()
        self._gather(None)  # nobody reads the own blocks any more

    def _shared_block(self, block: torch.nn.Module) -> tuple[_Offered, Packed]:
        offers: list[Offer] = []

        def memory_of(count: int) -> torch.Tensor:
            memory, offer = share(count, self._memory)
            offers.append(offer)
            return memory

        packed = pack(block, memory_of, by_use=self._by_use)
        packed.point()
        parts = tuple((part.use, part.bytes.numel(), _layout(part)) for part in packed.parts)
        return _Offered(offer=offers[0], parts=parts), packed

    def _opened(self, block: torch.nn.Module, offered: _Offered) -> Packed:
        memory, start, parts = open_offer(offered.offer, self._memory), 0, []
        tensors = {name: tensor for name, tensor in frozen(block) if tensor.numel()}
        names = {one.name for _, _, layout in offered.parts for one in layout}
        assert names == tensors.keys(), "the owner has other tensors"
        for use, size, layout in offered.parts:
            places = tuple(self._placed(tensors[one.name], one) for one in layout)
            parts.append(Part(use=use, bytes=memory[start : start + size], places=places))
            start += size
        return Packed(bytes=memory, parts=tuple(parts))

    def _placed(self, own: torch.Tensor, one: _Layout) -> Place:
        alike = (one.dtype, one.size, one.stride) == (own.dtype, tuple(own.shape), own.stride())
        assert alike, f"{one.name} is {own.dtype} {tuple(own.shape)} here, {one} with its owner"
        if own.is_meta:
            replace_values(own, torch.empty(0, dtype=one.dtype, device=self._device))
        return Place(tensor=own, **vars(one))


def _layout(part: Part) -> tuple[_Layout, ...]:
    return tuple(
        _Layout(name=one.name, dtype=one.dtype, size=one.size, stride=one.stride, start=one.start)
        for one in part.places
    )
