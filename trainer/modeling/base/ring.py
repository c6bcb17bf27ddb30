"""A bounded ring of host buffers that threads read a file into, ahead of its way to the device."""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError

from trainer.modeling.storage.block_memory import pin, unpin

MIB = 2**20
# answers of file systems without direct reads
_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP}


@dataclass(frozen=True, kw_only=True)
class RingSize:
    """Buffers of the ring and threads that fill them; a piece is one read."""

    piece_bytes: int
    pieces: int
    threads: int


# 16 requests of 8 MiB keep a fast disk busy, as many more are ready or on their way to the device
DISCRETE = RingSize(piece_bytes=8 * MIB, pieces=32, threads=16)
# where pinned memory is taken from the model's own
UNIFIED = RingSize(piece_bytes=4 * MIB, pieces=8, threads=8)

Copy = Callable[[int, torch.Tensor], None]
"""A function of a byte of the file and a flat uint8 tensor, which is filled with the bytes from there on."""


class Ring:
    """Host memory in `size.pieces` buffers, pinned for a GPU, and `size.threads` threads to read into them.

    Raises HardwareError where the memory cannot be pinned. `close` gives all of it back.
    """

    def __init__(self, device: torch.device, size: RingSize) -> None:
        assert size.piece_bytes % mmap.PAGESIZE == 0, "direct reads need whole pages"
        self.size = size
        self._device = device
        # private pages: torch's own pinned memory would stay with the process after the last shard
        memory = mmap.mmap(-1, size.pieces * size.piece_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # a direct read pins every page of its buffer: fewer are faster, where the kernel has large ones
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = self._whole.split(size.piece_bytes)
        self._views = [slot.numpy().data for slot in self._slots]
        self._copied: list[torch.cuda.Event] = []
        if device.type == "cuda":
            pin(self._whole, remedy="set features.loader to safetensors, which needs none")
            # blocking: threads that wait for a copy would otherwise spin
            self._copied = [torch.cuda.Event(blocking=True) for _ in range(size.pieces)]
        self._threads = ThreadPoolExecutor(size.threads, thread_name_prefix="read-shard")

    def close(self) -> None:
        """Wait for reads and copies under way and unpin the memory, which is freed with the ring."""
        self._threads.shutdown(cancel_futures=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            unpin(self._whole)

    @contextlib.contextmanager
    def reading(
        self, path: Path, spans: Iterable[tuple[int, int]], *, direct: bool, drop: bool
    ) -> Iterator[Copy]:
        """Read the file's bytes of `spans` (start, end) ahead, and of what lies around and between them no
        more than the rest of pages, and what one piece has between two of them.

        Spans are in the order of the file, and copies of them must be asked for in that order. `direct`: past
        the page cache, where the file system allows it. `drop`: nothing that was read stays in the page
        cache. Copies run on the current stream; one whose bytes cannot be read raises SafetensorError.
        """
        file = _open(path, direct=direct, drop=drop)
        state = _Ahead(coming=_pieces(spans, self.size.piece_bytes))
        for slot in range(self.size.pieces):
            self._read_ahead(file, state, slot)

        try:
            yield functools.partial(self._copy, file, state)
        finally:
            for _, _, future in state.pending:
                future.cancel()
            for _, slot, future in state.pending:
                if not future.cancelled():
                    # its thread writes to the slot and uses the descriptors until then
                    future.exception()
                self._mark(slot)
            file.close()

    def _copy(self, file: _File, state: _Ahead, position: int, target: torch.Tensor) -> None:
        """Fill `target` from the pieces that hold its bytes, and free the pieces before them."""
        piece_bytes = self.size.piece_bytes
        done, wanted = 0, target.numel()
        while done < wanted:
            piece, offset = divmod(position + done, piece_bytes)
            while state.pending[0][0] < piece:
                _, slot, future = state.pending.popleft()
                future.result()
                self._mark(slot)
                self._read_ahead(file, state, slot)
            first, slot, future = state.pending[0]
            assert first == piece, "tensors are to be asked for in the order of the file"
            future.result()
            count = min(wanted - done, piece_bytes - offset)
            target[done : done + count].copy_(self._slots[slot][offset : offset + count], non_blocking=True)
            done += count

    def _read_ahead(self, file: _File, state: _Ahead, slot: int) -> None:
        """Let a thread read the next piece into a free slot, if any is left."""
        for piece, start, end in state.coming:
            future = self._threads.submit(self._read, file, slot, start, end)
            state.pending.append((piece, slot, future))
            return

    def _read(self, file: _File, slot: int, start: int, end: int) -> None:
        if self._copied:
            self._copied[slot].synchronize()
        # direct reads are of whole pages; each byte lies in the slot where it lies in its piece
        start -= start % mmap.PAGESIZE
        first = start % self.size.piece_bytes
        stop = first + -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE
        file.read(self._views[slot][first:stop], start, end)

    def _mark(self, slot: int) -> None:
        """Record an event on the stream behind the slot's copies."""
        if self._copied:
            self._copied[slot].record(torch.cuda.current_stream(self._device))


@dataclass(kw_only=True)
class _Ahead:
    """Pieces of a file on their way."""

    coming: Iterator[tuple[int, int, int]]
    """Pieces still to be read: (piece, the bytes of the file to read it from and to)."""
    pending: deque[tuple[int, int, Future[None]]] = field(default_factory=deque)
    """Pieces being read or read, and not yet copied, in order: (piece, slot, its reading)."""


def _pieces(spans: Iterable[tuple[int, int]], piece_bytes: int) -> Iterator[tuple[int, int, int]]:
    """The pieces that spans lie in, each once: (piece, where the first span in it begins, where the last one
    ends), in bytes of the file.
    """
    known: tuple[int, int, int] | None = None
    for start, end in spans:
        if start == end:
            continue
        for piece in range(start // piece_bytes, (end - 1) // piece_bytes + 1):
            first = max(start, piece * piece_bytes)
            if known is not None and known[0] == piece:
                first = known[1]
            elif known is not None:
                yield known
            known = piece, first, min(end, (piece + 1) * piece_bytes)
    if known is not None:
        yield known


@dataclass(frozen=True, kw_only=True)
class _File:
    """Descriptors of one file; `direct` is the other one where direct reads are not wanted or refused."""

    direct: int
    buffered: int
    drop: bool

    def close(self) -> None:
        for descriptor in {self.direct, self.buffered}:
            os.close(descriptor)

    def read(self, target: memoryview, offset: int, end: int) -> None:
        """Fill `target` with the file's bytes from `offset` to at least `end`."""
        got, descriptor = 0, self.direct
        while offset + got < end:
            try:
                # always to the target's end: direct reads are of whole pages, and the file's end cuts them
                count = os.preadv(descriptor, [target[got:]], offset + got)
            except OSError as error:
                if descriptor == self.buffered or error.errno not in _NOT_DIRECT:
                    raise SafetensorError(f"cannot be read: {error.strerror}") from error
                # refused by this file system, or the rest of a read that ended within a page
                descriptor = self.buffered
                continue
            if count == 0:
                raise SafetensorError(f"ends at byte {offset + got}, within its tensors")
            got += count
        if self.drop:
            os.posix_fadvise(self.buffered, offset, got, os.POSIX_FADV_DONTNEED)


def _open(path: Path, *, direct: bool, drop: bool) -> _File:
    buffered = other = os.open(path, os.O_RDONLY)
    if direct:
        try:
            other = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                os.close(buffered)
                raise
    return _File(direct=other, buffered=buffered, drop=drop)
