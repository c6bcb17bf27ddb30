"""Memory that other processes of this host can read: of a GPU by CUDA's interprocess handles, or of the host.

CUDA's own allocations are made here, not torch's: an interprocess handle of memory from torch's expandable
segments needs a system call that containers refuse. A reader maps the memory on its own device, so that its
own copy engine reads and no context is made on the owner's GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.errors import HardwareError, PeerLostError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_OUT_OF_MEMORY = 2
# smaller allocations share a piece of the driver's, all of which a handle would open
_GRANULARITY = 2 << 20

_held: dict[int, int] = {}
"""Bytes of a GPU that this process shares, by address: torch's own statistics do not know them."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The name under which another process opens the memory; it can be pickled."""

    count: int
    """Bytes."""
    handle: bytes = b""
    """CUDA's handle; empty for host memory."""
    path: str = ""
    """The file of host memory, for as long as its owner holds it."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that lie outside torch's allocator, and the call that ends them."""

    bytes: torch.Tensor
    """1-D uint8; not to be read after `close`."""
    close: Callable[[], None]
    """Ends the memory, or its mapping, once all kernels that were enqueued are done."""


def held_bytes() -> int:
    """Memory of GPUs that this process shares with others."""
    return sum(_held.values())


def peak_bytes(before: int = 0) -> int:
    """Most memory of a GPU that this process has held since torch's statistics were reset, and at least
    `before`; 0 on a CPU.
    """
    return max(before, held_bytes() + torch.cuda.max_memory_reserved())


def share(count: int, device: torch.device) -> tuple[Memory, Offer]:
    """`count` bytes on the device, and their offer; readers must have closed them before they are closed.

    Raises torch.OutOfMemoryError, or HardwareError where the driver gives no handle.
    """
    if device.type == "cpu":
        file = os.memfd_create("trainer-weights", os.MFD_CLOEXEC)
        os.ftruncate(file, count)
        mapped = mmap.mmap(file, count)
        weakref.finalize(mapped, os.close, file)
        offer = Offer(count=count, path=f"/proc/{os.getpid()}/fd/{file}")
        return Memory(bytes=torch.frombuffer(mapped, dtype=torch.uint8), close=_nothing), offer
    address, handle = ctypes.c_uint64(), (ctypes.c_byte * _HANDLE_BYTES)()
    size = -(-count // _GRANULARITY) * _GRANULARITY
    torch.cuda.empty_cache()  # the driver does not make torch give anything back
    _call(device, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    _held[address.value] = size
    _call(device, "cuIpcGetMemHandle", handle, address)
    memory = _memory(address.value, count, device, "cuMemFree_v2")
    return memory, Offer(count=count, handle=bytes(handle))


def open_offer(offer: Offer, device: torch.device) -> Memory:
    """The bytes of another process, to be read only.

    Raises HardwareError where they cannot be, PeerLostError where their owner has ended.
    """
    if device.type == "cpu":
        # to be written too, as torch wants it: a private mapping would be a copy where it is pinned
        try:
            with Path(offer.path).open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), offer.count)
        except FileNotFoundError as error:
            raise PeerLostError(f"the owner of {offer.path} is gone") from error
        except PermissionError as error:
            # by a profile of the container, or as the owner is a Python with capabilities of its own
            raise HardwareError(
                f"processes of this run may not read each other's memory: {error.strerror}: {offer.path}",
                where="features.block_swap",
                remedy="write features.block_swap: 0 or parallel.gpus: 1, or run where a process may open"
                " /proc/PID/fd of another one of its user",
            ) from error
        return Memory(bytes=torch.frombuffer(mapped, dtype=torch.uint8), close=_nothing)

    class Handle(ctypes.Structure):  # the call takes it by value
        _fields_ = (("bytes", ctypes.c_byte * _HANDLE_BYTES),)

    address, handle = ctypes.c_uint64(), Handle.from_buffer_copy(offer.handle)
    flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
    _call(device, "cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, flags)
    return _memory(address.value, offer.count, device, "cuIpcCloseMemHandle")


def _nothing() -> None:
    """Host memory ends with its tensor."""


def _memory(address: int, count: int, device: torch.device, ending: str) -> Memory:
    # torch's other ways ask the driver where memory is, and would copy what lies with another GPU
    storage = torch._C._construct_storage_from_data_pointer(address, device, count)
    found = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    assert (found.data_ptr(), found.numel(), found.device) == (address, count, device)

    def close() -> None:
        torch.cuda.synchronize(device)
        _call(device, ending, ctypes.c_uint64(address))
        _held.pop(address, None)

    return Memory(bytes=found, close=close)


def _call(device: torch.device, name: str, *arguments: Any) -> None:
    """A call of CUDA's driver library in the device's context."""
    library = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        code = library[name](*arguments)
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {name} of blocks that are shared with other GPUs")
    if code != 0:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        told = (text.value or b"an unknown error").decode()
        raise HardwareError(
            f"GPUs of this run cannot read each other's memory: {name} answers {told}",
            where="parallel.shard",
            remedy="write parallel.shard: none",
        )
