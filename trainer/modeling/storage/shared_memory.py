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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.errors import HardwareError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_OUT_OF_MEMORY = 2


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The name under which another process opens the memory; it can be pickled."""

    count: int
    """Bytes."""
    handle: bytes = b""
    """CUDA's handle; empty for host memory."""
    path: str = ""
    """The file of host memory, for as long as its owner holds it."""


def share(count: int, device: torch.device) -> tuple[torch.Tensor, Offer]:
    """`count` bytes on the device, 1-D uint8, and their offer. They are freed with the tensor.

    Readers must have closed what they opened by then. Raises torch.OutOfMemoryError, or HardwareError where
    the driver gives no handle.
    """
    if device.type == "cpu":
        file = os.memfd_create("trainer-weights", os.MFD_CLOEXEC)
        os.ftruncate(file, count)
        memory = mmap.mmap(file, count)
        weakref.finalize(memory, os.close, file)
        offer = Offer(count=count, path=f"/proc/{os.getpid()}/fd/{file}")
        return torch.frombuffer(memory, dtype=torch.uint8), offer
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count))
    tensor = _tensor(address.value, count, device, "cuMemFree_v2")
    handle = (ctypes.c_byte * _HANDLE_BYTES)()
    _call("cuIpcGetMemHandle", handle, address)
    return tensor, Offer(count=count, handle=bytes(handle))


def open_offer(offer: Offer, device: torch.device) -> torch.Tensor:
    """The bytes of another process, 1-D uint8, to be read only. Raises HardwareError where they cannot be."""
    if device.type == "cpu":
        # to be written too, as torch wants it: a private mapping would be a copy where it is pinned
        with Path(offer.path).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), offer.count)
        return torch.frombuffer(memory, dtype=torch.uint8)

    class Handle(ctypes.Structure):  # the call takes it by value
        _fields_ = (("bytes", ctypes.c_byte * _HANDLE_BYTES),)

    address = ctypes.c_uint64()
    handle = Handle.from_buffer_copy(offer.handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return _tensor(address.value, offer.count, device, "cuIpcCloseMemHandle")


class _Memory:
    """CUDA memory that torch reads through the array interface, and the call that ends it."""

    def __init__(self, address: int, count: int, ending: str) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        # a process that ends gives it back anyway
        weakref.finalize(self, _end, ending, address).atexit = False


def _tensor(address: int, count: int, device: torch.device, ending: str) -> torch.Tensor:
    return torch.as_tensor(_Memory(address, count, ending), device=device)


def _end(ending: str, address: int) -> None:
    torch.cuda.synchronize()
    _call(ending, ctypes.c_uint64(address))


def _call(name: str, *arguments: Any) -> None:
    """A call of CUDA's driver library, in the context that torch has made current."""
    library = ctypes.CDLL("libcuda.so.1")
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
