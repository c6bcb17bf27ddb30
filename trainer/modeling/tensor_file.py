"""Tensors in safetensors files with deterministic bytes, taken to the host one at a time.

The library wants all of them there at once: a full checkpoint of a 12 B model would need 70 GiB.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.errors import DataError
from trainer.files import atomic, safetensors

DTYPES: Mapping[str, torch.dtype] = {name: vars(torch)[theirs] for name, theirs in safetensors.DTYPES.items()}
"""Types of safetensors that torch has, by their names in headers."""

_MOST_BEHIND = 4
"""Tensors on the host that are written and wait to be hashed."""


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
    rows = [(name, tensors[name]) for name in sorted(tensors)]
    entries = safetensors.entries((name, str(one.dtype), one.shape, one.nbytes) for name, one in rows)
    head = safetensors.head(entries, metadata)
    digest = hashlib.sha256(head)

    def buffers() -> Iterator[memoryview]:
        behind: deque[Future[None]] = deque()
        for name, one in rows:
            tensor = one.make() if isinstance(one, Later) else one
            if (tensor.dtype, tuple(tensor.shape)) != (one.dtype, tuple(one.shape)):
                made = f"{tuple(tensor.shape)} in {tensor.dtype}"
                raise _refused(f"{name} is {made}, not {tuple(one.shape)} in {one.dtype}", path)
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            raw: memoryview = flat.view(torch.uint8).numpy().data
            # both let go of the interpreter: a file is hashed while it is written and synced
            behind.append(pool.submit(digest.update, raw))
            yield raw
            if len(behind) > _MOST_BEHIND:
                behind.popleft().result()
            if on_tensor is not None:
                on_tensor()

    with ThreadPoolExecutor(max_workers=1) as pool, atomic.writing(path) as file:
        file.write(head)
        file.writelines(buffers())
    return digest.hexdigest()


def _refused(what: str, path: Path) -> DataError:
    return DataError(
        f"{what}: a file with less than was trained is not written",
        where=str(path),
        remedy="this is a defect of the trainer: please report it; what was saved before stays",
    )


def take_part(tensors: Mapping[str, Writable]) -> None:
    """Make the tensors that are made later, in the order in which another rank writes them."""
    for name in sorted(tensors):
        one = tensors[name]
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


def rewrite_sorted(path: Path, metadata: Mapping[str, str]) -> None:
    """Rewrite a file that a library wrote so that equal tensors give equal bytes, with more metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = {**(file.metadata() or {}), **metadata}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    write_tensors(path, tensors, metadata, None)
