"""The frozen tensors of a block, packed into one piece of memory on any device."""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from trainer.errors import HardwareError

# compiled kernels may rely on what the allocator gives out; a storage keeps its tensors' places modulo this
_ALIGNMENT = 256


Use = Literal["forward", "backward", "both"]
"""The passes that read a tensor."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One frozen tensor and the place of its bytes among those of its part."""

    name: str
    """The tensor's name in the block."""
    tensor: torch.Tensor
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of a part's bytes, 1-D uint8."""
        typed, start = memory.view(self.dtype), int(memory.storage_offset()) + self.start
        return torch.as_strided(typed, self.size, self.stride, start // self.dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Frozen tensors of a block that the same passes read, beside each other."""

    use: Use
    bytes: torch.Tensor
    """1-D uint8, a part of the block's memory."""
    places: tuple[Place, ...]

    def point(self, memory: torch.Tensor) -> None:
        """Let the tensors be views of `memory`, which holds, or will hold, the part's bytes."""
        for place in self.places:
            place.tensor.data = place.within(memory)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One block's frozen tensors in one piece of memory."""

    bytes: torch.Tensor
    parts: tuple[Part, ...]

    def point(self) -> None:
        """Let the block's tensors be views of this memory."""
        for part in self.parts:
            part.point(part.bytes)


def frozen(block: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The block's frozen tensors by name; buffers are made its own, as layers of several blocks may share
    one.
    """
    yield from ((name, one) for name, one in block.named_parameters() if not one.requires_grad)
    for owner, module in block.named_modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            own = module._buffers[name] = buffer.data
            yield f"{owner}.{name}".removeprefix("."), own


def pages(count: int) -> torch.Tensor:
    """`count` bytes of host memory, at least one, in whole pages that nothing else lies in: 1-D uint8, zeros.

    What is pinned is pinned by the page. Raises MemoryError where the host has no such memory.
    """
    try:
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {count / 2**20:.0f} MiB of host memory for a block that waits") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def pin(memory: torch.Tensor, *, remedy: str) -> None:
    """Let the device read host memory without a copy by the driver.

    torch's own pinned memory comes in powers of two, and stays with the process. Raises HardwareError with
    `remedy` where the memory cannot be pinned.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status != 0:
        raise HardwareError(
            f"the driver does not pin {memory.numel() // 2**20} MiB of host memory (CUDA error {status})",
            remedy=remedy,
        )


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`; whatever the device reads of the memory must have ended."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


class Pins:
    """Pieces of host memory that stay pinned as long as this is held: pinned memory must not be freed."""

    def __init__(self) -> None:
        self._pinned: list[torch.Tensor] = []
        # a process that ends unpins it anyway
        weakref.finalize(self, _unpin_all, self._pinned).atexit = False

    def replace(self, memories: Sequence[torch.Tensor]) -> None:
        """Pin these in place of the ones before; raises HardwareError where they cannot be."""
        _unpin_all(self._pinned)
        for memory in memories:
            pin(memory, remedy="features.block_swap: 0 needs none")
            self._pinned.append(memory)


def _unpin_all(memories: list[torch.Tensor]) -> None:
    if memories:
        torch.cuda.synchronize()
    while memories:
        unpin(memories.pop())


def pack(
    block: torch.nn.Module,
    memory_of: Callable[[int], torch.Tensor],
    *,
    forward_only: Collection[torch.nn.Module] | None = None,
) -> Packed:
    """Copy the bytes of the block's frozen tensors to one piece of memory, shared bytes once.

    `memory_of` gives so many bytes, 1-D uint8, on any device. What one pass alone reads is parted unless
    `forward_only` is None: each copy of a weight that is kept twice, and all of the modules given, whose
    inputs have no gradient. None where something of the forward pass is repeated in backward.
    """
    groups: dict[Use, list[tuple[str, torch.Tensor]]] = {}
    uses = {} if forward_only is None else _uses(block, forward_only)
    for name, tensor in frozen(block):
        if tensor.numel():
            groups.setdefault(uses.get(name, "both"), []).append((name, tensor))
    runs = {use: _runs(tensor for _, tensor in tensors) for use, tensors in groups.items()}
    sizes = {use: sum(run.room for run in found) for use, found in runs.items()}
    memory, start, parts = memory_of(sum(sizes.values())), 0, []
    for use, tensors in groups.items():
        own = memory[start : start + sizes[use]]
        parts.append(Part(use=use, bytes=own, places=_copied(tensors, runs[use], own)))
        start += sizes[use]
    return Packed(bytes=memory, parts=tuple(parts))


def _uses(block: torch.nn.Module, forward_only: Collection[torch.nn.Module]) -> dict[str, Use]:
    """The pass that reads a tensor, where it is one alone."""
    found: dict[str, Use] = {}
    for owner, module in block.named_modules():
        own = dict(module.named_buffers(recurse=False)) | dict(module.named_parameters(recurse=False))
        for kind in ("", "joint_"):
            if f"{kind}transposed" in own:
                found[f"{owner}.{kind}weight".removeprefix(".")] = "forward"
                found[f"{owner}.{kind}transposed".removeprefix(".")] = "backward"
        if module in forward_only:
            found.update({f"{owner}.{name}".removeprefix("."): "forward" for name in own})
    return found


def _copied(
    tensors: Sequence[tuple[str, torch.Tensor]], runs: Sequence[_Run], memory: torch.Tensor
) -> tuple[Place, ...]:
    """The tensors' places in `memory`, to which their bytes are copied."""
    start, starts = 0, {}
    for run in runs:
        whole = torch.empty(0, dtype=torch.uint8, device=run.storage.device).set_(run.storage)
        memory[start : start + run.high - run.low].copy_(whole[run.low : run.high])
        starts.update(dict.fromkeys(run.tensors, start - run.low))
        start += run.room
    return tuple(
        Place(
            name=name,
            tensor=tensor,
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            start=starts[id(tensor)] + int(tensor.storage_offset()) * tensor.itemsize,
        )
        for name, tensor in tensors
    )


@dataclass(kw_only=True)
class _Run:
    """Bytes of a storage, from `low` to before `high`, in which the spans of some tensors overlap."""

    storage: torch.UntypedStorage
    low: int
    high: int
    tensors: list[int]
    """Ids of the tensors."""

    @property
    def room(self) -> int:
        return -(-(self.high - self.low) // _ALIGNMENT) * _ALIGNMENT


def _runs(tensors: Iterable[torch.Tensor]) -> list[_Run]:
    """The bytes that tensors lie in, those that several share once, without the holes between them."""
    spans: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
    for tensor in tensors:
        spans.setdefault(tensor.untyped_storage().data_ptr(), []).append((*_span(tensor), tensor))
    runs: list[_Run] = []
    for of_storage in spans.values():
        last: _Run | None = None
        for low, high, tensor in sorted(of_storage, key=lambda span: span[:2]):
            if last is None or low >= last.high:
                storage = tensor.untyped_storage()
                runs.append(last := _Run(storage=storage, low=low, high=high, tensors=[]))
            last.high = max(last.high, high)
            last.tensors.append(id(tensor))
    return runs


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, rounded down to the alignment, and the byte after its last."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    low = first * tensor.itemsize // _ALIGNMENT * _ALIGNMENT
    return low, (last + 1) * tensor.itemsize


def replace_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let a frozen tensor be `values`, on whatever device: whoever holds the tensor keeps it.

    Assigning to its `data` does so only among devices that have memory.
    """
    own: torch.Tensor = torch.nn.Parameter(values, requires_grad=False)
    torch.utils.swap_tensors(tensor, own if isinstance(tensor, torch.nn.Parameter) else values)


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same size, strides and type on the meta device."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def compact(blocks: Iterable[torch.nn.Module]) -> None:
    """Let the frozen tensors of each block lie in one piece, on the device where they are.

    Weights that are joined leave holes where the separate ones were, of a size that little else has and too
    small to be given back: up to a sixth of an int8 base. What a copied block leaves can be given back, or
    take the next one.
    """
    for block in blocks:
        devices = {tensor.device for _, tensor in frozen(block) if tensor.numel()}
        assert len(devices) <= 1, f"a block's frozen tensors are on {devices}"
        for device in devices:
            pack(block, functools.partial(torch.empty, dtype=torch.uint8, device=device)).point()
