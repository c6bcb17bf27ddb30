"""Tensors in safetensors files with deterministic bytes, taken to the host one at a time.

The library wants all of them there at once: a full checkpoint of a 12 B model would need 70 GiB.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from trainer.errors import DataError
from trainer.files import atomic, safetensors

DTYPES: Mapping[str, torch.dtype] = {name: vars(torch)[theirs] for name, theirs in safetensors.DTYPES.items()}
"""Types of safetensors that torch has, by their names in headers."""

_FILES_AT_ONCE = 4
"""Files that are written side by side: one is hashed at 1.1 GB/s by one core, and disks take more."""
_MOST_BEHIND, _MOST_BEHIND_BYTES = 2 * _FILES_AT_ONCE, 2**30
"""Tensors on the host that wait to be written and hashed; of a larger one nothing but itself."""


@dataclass(frozen=True, kw_only=True)
class Later:
    """A tensor that is made when its turn comes: of weights in rows, one is whole at a time."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]
    """Gives it on any device; all ranks that have rows of it must call this at the same time."""

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


Writable = torch.Tensor | Later


def write_tensors(
    path: Path,
    tensors: Mapping[str, Writable],
    metadata: Mapping[str, str],
    on_tensor: Callable[[], None] | None,
) -> str:
    """Write tensors from any device to `path`, sorted by name, and sync it; `on_tensor` runs after each.

    Gives the file's SHA-256. Raises StorageError when it cannot be written, and DataError for a tensor that
    is made otherwise than was said; nothing is left of the file then.
    """
    return write_files({path: tensors}, metadata, on_tensor)[path]


def write_files(
    files: Mapping[Path, Mapping[str, Writable]],
    metadata: Mapping[str, str],
    on_tensor: Callable[[], None] | None,
) -> dict[Path, str]:
    """Write the tensors of each file, some files at a time; gives their SHA-256.

    As `write_tensors` does one: where an error is raised, nothing is left of those not yet complete.
    """
    digests: dict[Path, str] = {}
    for group in _groups(files):
        with ExitStack() as stack:
            writers = [stack.enter_context(_writing(path, files[path], metadata)) for path in group]
            host = _Host()
            for number, name, one in in_turn([files[path] for path in group]):
                tensor = one.make() if isinstance(one, Later) else one
                if (tensor.dtype, tuple(tensor.shape)) != (one.dtype, tuple(one.shape)):
                    made = f"{tuple(tensor.shape)} in {tensor.dtype}"
                    raise _refused(f"{name} is {made}, not {tuple(one.shape)} in {one.dtype}", group[number])
                host.give(tensor.detach(), writers[number])
                if on_tensor is not None:
                    on_tensor()
            host.wait()
            for future in [writer.sync() for writer in writers]:
                future.result()
        digests |= {writer.path: writer.digest.hexdigest() for writer in writers}
    return digests


def _groups(files: Iterable[Path]) -> Iterator[tuple[Path, ...]]:
    """The files in order, as many at a time as are written side by side."""
    rest = iter(files)
    while group := tuple(itertools.islice(rest, _FILES_AT_ONCE)):
        yield group


def in_turn(files: Sequence[Mapping[str, Writable]]) -> Iterator[tuple[int, str, Writable]]:
    """The order in which tensors of files are written, as (file, name, tensor): one of each file in turn, of
    as many files as are written side by side.
    """
    for first in range(0, len(files), _FILES_AT_ONCE):
        sorts = [sorted(one) for one in files[first : first + _FILES_AT_ONCE]]
        for names in itertools.zip_longest(*sorts):
            for number, name in enumerate(names, first):
                if name is not None:
                    yield number, name, files[number][name]


class _Writer:
    """One file being written: a thread writes and another hashes, both in the order of what is given."""

    def __init__(self, path: Path, file: BinaryIO, head: bytes, stack: ExitStack) -> None:
        self.path, self.digest, self._file = path, hashlib.sha256(head), file
        self._threads = [stack.enter_context(ThreadPoolExecutor(max_workers=1)) for _ in range(2)]
        file.write(head)

    def give(self, raw: memoryview) -> list[Future[None]]:
        """Write and hash these bytes, which stay as they are until both are done."""
        return [self._threads[0].submit(self._write, raw), self._threads[1].submit(self.digest.update, raw)]

    def _write(self, raw: memoryview) -> None:
        with atomic.no_space_told(self.path):
            self._file.write(raw)

    def sync(self) -> Future[None]:
        """Bring the bytes to the disk, beside other files."""
        return self._threads[0].submit(self._sync)

    def _sync(self) -> None:
        with atomic.no_space_told(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())


@contextmanager
def _writing(path: Path, tensors: Mapping[str, Writable], metadata: Mapping[str, str]) -> Iterator[_Writer]:
    """A file that is there when the block ends, and nothing of it where the block raises."""
    entries = safetensors.entries(
        (name, str(one.dtype), one.shape, one.nbytes) for name, one in sorted(tensors.items())
    )
    with atomic.writing(path) as file, ExitStack() as stack:
        yield _Writer(path, file, safetensors.head(entries, metadata), stack)


class _Host:
    """Host memory that tensors of a device pass through on their way to files."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._behind: deque[tuple[list[Future[None]], int, torch.Tensor | None]] = deque()
        self._behind_bytes = 0

    def give(self, tensor: torch.Tensor, writer: _Writer) -> None:
        """Let the writer have a tensor's bytes; waits where too many are under way."""
        while self._behind and (
            len(self._behind) >= _MOST_BEHIND or self._behind_bytes + tensor.nbytes > _MOST_BEHIND_BYTES
        ):
            self._wait_for_one()
        flat, buffer = tensor.contiguous().reshape(-1).view(torch.uint8), None
        if flat.device.type != "cpu":
            # memory that is used again: the kernel clears fresh pages one by one
            buffer = self._buffer(flat.numel())
            flat = buffer[: flat.numel()].copy_(flat)
        self._behind.append((writer.give(raw := flat.numpy().data), raw.nbytes, buffer))
        self._behind_bytes += raw.nbytes

    def _buffer(self, size: int) -> torch.Tensor:
        fits = [one for one in self._free if one.numel() >= size]
        if not fits:
            self._free.clear()  # smaller ones
            return torch.empty(size, dtype=torch.uint8)
        found = min(fits, key=torch.Tensor.numel)
        self._free = [one for one in self._free if one is not found]
        return found

    def _wait_for_one(self) -> None:
        futures, size, buffer = self._behind.popleft()
        for future in futures:
            future.result()
        self._behind_bytes -= size
        if buffer is not None:
            self._free.append(buffer)

    def wait(self) -> None:
        """Wait until all is written and hashed. Raises what a writer raised."""
        while self._behind:
            self._wait_for_one()


def _refused(what: str, path: Path) -> DataError:
    return DataError(
        f"{what}: a file with less than was trained is not written",
        where=str(path),
        remedy="this is a defect of the trainer: please report it; what was saved before stays",
    )


def take_part(files: Sequence[Mapping[str, Writable]]) -> None:
    """Make the tensors that are made later, in the order in which another rank writes these files."""
    for _, _, one in in_turn(files):
        if isinstance(one, Later):
            one.make()


def require_whole(tensors: Mapping[str, Writable], path: Path, least_bytes: int = 0) -> None:
    """Raise DataError where a tensor that is to be written to `path` is empty, or all have fewer bytes."""
    found = sum(one.nbytes for one in tensors.values())
    if found < least_bytes:
        raise _refused(f"{found} bytes of weights are to be written, the model has {least_bytes}", path)
    for name, one in tensors.items():
        if not one.nbytes:
            raise _refused(f"{name} has no values", path)


def split_shards(tensors: Mapping[str, Writable], limit_bytes: int) -> list[dict[str, Writable]]:
    """Group tensors by name order into shards of at most `limit_bytes`; a larger tensor gets its own."""
    shards: list[dict[str, Writable]] = [{}]
    used = 0
    for name in sorted(tensors):
        size = tensors[name].nbytes
        if shards[-1] and used + size > limit_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensors[name]
        used += size
    return shards


def require_written(path: Path, digest: str) -> None:
    """Raise DataError unless the file at `path`, read back, has the SHA-256 of what was written."""
    with atomic.reading_told(path), path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            what = "the file read back from disk is not what was written"
            raise DataError(what, where=str(path), remedy="look at this disk and at the machine's memory")


def rewrite_sorted(path: Path, metadata: Mapping[str, str]) -> None:
    """Rewrite a file that a library wrote so that equal tensors give equal bytes, with more metadata.

    The new file is read back: DataError where it is not what was written.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = {**(file.metadata() or {}), **metadata}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    require_written(path, write_tensors(path, tensors, metadata, None))
