"""Frozen weights of repeated blocks that the processes which train together share, each of which keeps some.

Block number k of those that are shared belongs to member k mod N of a group of N processes. Its owner
computes with it where it lies; the others copy it from there when its turn comes. Weights that never change
need no partner: nobody waits for anybody, whatever the others do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
from trainer.modeling.storage.shared_memory import Memory, Offer, open_offer, share


class Agree(Protocol):
    """Gives every process what `make` gave on each, in the order of the group; all must call it together.

    An error of one is raised on all.
    """

    def __call__(self, make: Callable[[], Any]) -> list[Any]:
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
    others need no values when this is made: they may be on the meta device. `forward_only` is that of `pack`.
    """

    def __init__(
        self,
        blocks: Sequence[torch.nn.Module],
        *,
        member: int,
        size: int,
        agree: Agree,
        device: str,
        on_host: bool = False,
        forward_only: Collection[torch.nn.Module] | None = None,
    ) -> None:
        self._forward_only = forward_only
        self._shared, self._member, self._size = tuple(blocks), member, size
        self._agree, self._device = agree, torch.device(device)
        self._on_host = on_host
        self._memory = torch.device("cpu") if on_host else self._device
        self._pins = Pins() if on_host and self._device.type == "cuda" else None
        self._own: dict[int, tuple[_Offered, Packed]] = {}
        self._made: dict[int, Memory] = {}
        self._opened: list[Memory] = []
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
        every: dict[int, _Offered] = {}
        for offers in self._agree(self._share_own):
            every.update(offers)
        found: dict[int, Packed] = {}

        def open_others() -> None:
            for number in self._numbers(own=False):
                found[number] = self._open(self._shared[number], every[number])
            if self._on_host:
                found.update({number: packed for number, (_, packed) in self._own.items()})
            if self._pins is not None:
                self._pins.replace([packed.bytes for packed in found.values()])

        self._agree(open_others)
        return [found[number] for number in sorted(found)]

    def unpack(self) -> None:
        """Let the tensors of the others' blocks have no values; all members must call it together."""
        for number in self._numbers(own=False):
            for _, tensor in frozen(self._shared[number]):
                replace_values(tensor, without_values(tensor))
        for _, packed in self._own.values():
            packed.point()
        while self._opened:
            self._opened.pop().close()
        self._agree(lambda: None)  # nobody reads the own blocks any more

    def _share_own(self) -> dict[int, _Offered]:
        for number in self._numbers(own=True):
            before = self._made.get(number)
            self._own[number] = self._share(number)
            if before is not None:
                before.close()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        return {number: offered for number, (offered, _) in self._own.items()}

    def _share(self, number: int) -> tuple[_Offered, Packed]:
        offers: list[Offer] = []

        def memory_of(count: int) -> torch.Tensor:
            self._made[number], offer = share(count, self._memory)
            offers.append(offer)
            return self._made[number].bytes

        packed = pack(self._shared[number], memory_of, forward_only=self._forward_only)
        packed.point()
        parts = tuple((part.use, part.bytes.numel(), _layout(part)) for part in packed.parts)
        return _Offered(offer=offers[0], parts=parts), packed

    def _open(self, block: torch.nn.Module, offered: _Offered) -> Packed:
        memory, start, parts = open_offer(offered.offer, self._memory), 0, []
        self._opened.append(memory)
        tensors = {name: tensor for name, tensor in frozen(block) if tensor.numel()}
        names = {one.name for _, _, layout in offered.parts for one in layout}
        assert names == tensors.keys(), "the owner has other tensors"
        for use, size, layout in offered.parts:
            places = tuple(self._placed(tensors[one.name], one) for one in layout)
            parts.append(Part(use=use, bytes=memory.bytes[start : start + size], places=places))
            start += size
        return Packed(bytes=memory.bytes, parts=tuple(parts))

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
