"""Safetensors shards to the device, tensor by tensor, read in the way that suits where they are.

Two libraries can do it, and neither alone is right on a GPU. safetensors maps the file: disks see one small
request at a time, and what was mapped counts as the process's memory. fastsafetensors reads past the page
cache by default, which is slow for a file that is in it. So `auto` reads with threads of our own into a ring
of pinned buffers: past the page cache for a file that is on disk, through it for one that is there. Device
and host hold one tensor and one ring beyond what the caller keeps.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy
import torch
from safetensors import SafetensorError, safe_open

from trainer.files.safetensors import read_header
from trainer.modeling.base.ring import DISCRETE, UNIFIED, Ring, RingSize
from trainer.modeling.tensor_file import DTYPES

Method = Literal["parallel", "fastsafetensors", "safetensors"]

CACHED_SHARE = 0.5
"""`auto` reads through the page cache where it holds at least this share of a file."""
# limits of fastsafetensors: device memory beside the tensors that were asked for, and pinned host memory
_BATCH_BYTES = 2**30
_BOUNCE_KIB = DISCRETE.pieces * DISCRETE.piece_bytes // 2**10
_SAMPLE_WINDOWS, _SAMPLE_PAGES = 64, 64


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The method by which one file is read, and the reason."""

    method: Method
    direct: bool = False
    """Past the page cache, where the file system allows it; only for `parallel`."""
    reason: str

    def __str__(self) -> str:
        if self.method != "parallel":
            return f"{self.method} ({self.reason})"
        return f"parallel reads {'past' if self.direct else 'through'} the page cache ({self.reason})"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """An open file."""

    ends: Mapping[str, int]
    """Byte of the file that each tensor ends before, by name, in the order of the file."""
    get_tensor: Callable[[str], torch.Tensor]
    """A tensor on the device by name, of those that were selected. Ask in the order of `ends`."""
    zeros: Callable[[str], torch.Tensor]
    """Zeros of a tensor's size and type on the device, by name; nothing is read."""


def choose(path: Path, loader: str, device: torch.device) -> Choice:
    """The method for `path` where the plan's loader is `loader`."""
    match loader:
        case "fastsafetensors" | "safetensors":
            return Choice(method=loader, reason="as planned")
    assert loader in ("auto", "fastsafetensors-cold", "fastsafetensors-cached"), loader
    if device.type != "cuda":
        return Choice(method="safetensors", reason="nothing is copied to a GPU")
    share = page_cache_share(path)
    if share is None:
        return Choice(method="parallel", reason="whether it is there cannot be told")
    reason = f"{share:.0%} of the file is there"
    state = "cold" if share < CACHED_SHARE else "cached"
    if loader.endswith(f"-{state}"):
        return Choice(method="fastsafetensors", reason=f"{reason}, and it was measured to be faster then")
    return Choice(method="parallel", direct=share < CACHED_SHARE, reason=reason)


def page_cache_share(path: Path) -> float | None:
    """Share of the file's pages that are in the page cache, over evenly spread samples; None if it cannot be
    told.
    """
    status = path.stat()
    if status.st_size == 0:
        return None
    # to anyone else mincore says that every page is there (Linux, mm/mincore.c, can_do_mincore)
    if status.st_uid == os.geteuid() or os.access(path, os.W_OK):
        return _resident_share(path)
    return _readable_at_once_share(path, status.st_size)


def _resident_share(path: Path) -> float | None:
    """The share that mincore reports of pages that are mapped but never touched; None where it fails."""
    mapped = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    address, page = mapped.ctypes.data, mmap.PAGESIZE
    pages = math.ceil(mapped.size / page)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    resident = seen = 0
    answer = (ctypes.c_ubyte * _SAMPLE_PAGES)()
    windows = min(_SAMPLE_WINDOWS, math.ceil(pages / _SAMPLE_PAGES))
    for window in range(windows):
        first = window * pages // windows
        count = min(_SAMPLE_PAGES, pages - first)
        if mincore(address + first * page, count * page, answer) != 0:
            return None
        resident += sum(value & 1 for value in answer[:count])
        seen += count
    return resident / seen


def _readable_at_once_share(path: Path, size: int) -> float | None:
    """The share of bytes at random places that come without a wait for a disk; None if it cannot be told."""
    pages = math.ceil(size / mmap.PAGESIZE)
    chosen = random.Random().sample(range(pages), min(pages, _SAMPLE_PAGES))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # without it every miss would read the pages behind it too
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        found = 0
        for page in chosen:
            try:
                found += os.preadv(descriptor, [bytearray(1)], page * mmap.PAGESIZE, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    return None
                raise
    finally:
        os.close(descriptor)
    return found / len(chosen)


Select = Callable[[Mapping[str, int]], Collection[str]]
"""A function of the bytes of a file's tensors by name, in its order: the names of those to read."""


class ShardReader(AbstractContextManager["ShardReader"]):
    """Opens one shard after the other. They share one ring, which is made for the first shard that needs it.

    `choice` gives the method for a file, and `say` is told of it. Use the reader in a `with` block.
    """

    def __init__(
        self,
        device: str,
        *,
        loader: str = "auto",
        say: Callable[[str], None] | None = None,
        choice: Callable[[Path], Choice] | None = None,
        size: RingSize | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._say = say
        self._choice = choice or functools.partial(choose, loader=loader, device=self._device)
        # one pool of memory for both: pinned buffers and page cache are taken from the model
        self._unified = self._device.type == "cuda" and bool(
            torch.cuda.get_device_properties(self._device).is_integrated
        )
        self._size = size or (UNIFIED if self._unified else DISCRETE)
        self._ring: Ring | None = None

    def __exit__(self, *error: object) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    @contextmanager
    def open(self, path: Path, select: Select = lambda sizes: sizes) -> Iterator[Shard]:
        """The shard at `path`, of which the selected tensors can be had: parallel reads read these alone, to
        whole pages.

        Raises SafetensorError where the file is not what its header says.
        """
        header = _entries(path)
        selected = frozenset(select({name: entry.end - entry.start for name, entry in header.items()}))
        wanted = {name: entry for name, entry in header.items() if name in selected}
        choice = self._choice(path)
        if self._say is not None:
            self._say(f"{path.name}: {choice}")
        with ExitStack() as stack:
            if choice.method == "safetensors":
                file = stack.enter_context(safe_open(path, framework="pt", device=str(self._device)))
                get_tensor = file.get_tensor
            elif choice.method == "fastsafetensors":
                get_tensor = stack.enter_context(_batched(path, header, self._device))
            else:
                self._ring = self._ring or Ring(self._device, self._size)
                get_tensor = stack.enter_context(
                    _streamed(path, wanted, self._device, self._ring, choice.direct, self._unified)
                )

            def zeros(name: str) -> torch.Tensor:
                return torch.zeros(header[name].shape, dtype=header[name].dtype, device=self._device)

            ends = {name: entry.end for name, entry in header.items()}
            yield Shard(ends=ends, get_tensor=functools.partial(_aligned, get_tensor), zeros=zeros)


_Get = Callable[[str], torch.Tensor]
# what torch's allocator for CPUs gives out
_ALIGNMENT = 64


def _aligned(get_tensor: Callable[[str], torch.Tensor], name: str) -> torch.Tensor:
    """A tensor that begins where one of torch's own would.

    On a CPU it may be a view of the file, and libraries' products of matrices may add in another order where
    it begins elsewhere: a weight that another process sent would give other bits.
    """
    found = get_tensor(name)
    off = found.device.type == "cpu" and found.data_ptr() % _ALIGNMENT
    return found.clone() if off else found


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One tensor; `start` and `end` are bytes of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def _entries(path: Path) -> dict[str, _Entry]:
    """Tensors by name in the order of the file; the library itself checks that header and file agree."""
    with safe_open(path, framework="pt"):
        pass
    header = read_header(path)
    unknown = sorted({said["dtype"] for said in header.tensors.values()} - DTYPES.keys())
    if unknown:
        raise SafetensorError(f"torch has no type for {', '.join(unknown)}")
    ordered = sorted((said["data_offsets"], name) for name, said in header.tensors.items())
    return {
        name: _Entry(
            dtype=DTYPES[header.tensors[name]["dtype"]],
            shape=header.shapes[name],
            start=header.start + begin,
            end=header.start + end,
        )
        for (begin, end), name in ordered
    }


@contextmanager
def _batched(path: Path, header: Mapping[str, _Entry], device: torch.device) -> Iterator[_Get]:
    """fastsafetensors, some tensors at a time: its buffers free as a whole, and a shard may have 10 GiB."""
    from fastsafetensors import ParallelLoader, SingleGroup

    loader = ParallelLoader(
        SingleGroup(),
        [str(path)],
        use_tqdm_on_load=False,
        # its devices need an index
        device="cpu" if device.type == "cpu" else f"cuda:{device.index or 0}",
        bbuf_size_kb=_BOUNCE_KIB,
        max_threads=DISCRETE.threads,
        nogds=True,
        max_batch_bytes=max(_BATCH_BYTES, *(entry.end - entry.start for entry in header.values()), 1),
    )
    with closing(loader), closing(loader.iterate_weights()) as tensors:

        def tensor(name: str) -> torch.Tensor:
            entry = header[name]
            if entry.start == entry.end:
                return torch.empty(entry.shape, dtype=entry.dtype, device=device)
            # the tensors before it are let go
            found = next((tensor for key, tensor in tensors if key == name), None)
            assert found is not None, f"{name} was passed already"
            return found

        yield tensor


@contextmanager
def _streamed(
    path: Path, wanted: Mapping[str, _Entry], device: torch.device, ring: Ring, direct: bool, drop: bool
) -> Iterator[_Get]:
    """Parallel reads into the ring, from where each tensor is copied to memory of its own."""
    spans = [(entry.start, entry.end) for entry in wanted.values()]
    with ring.reading(path, spans, direct=direct, drop=drop) as bytes_of:

        def tensor(name: str) -> torch.Tensor:
            entry = wanted[name]
            made = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            bytes_of(entry.start, made.reshape(-1).view(torch.uint8))
            return made

        yield tensor
