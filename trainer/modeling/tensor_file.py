"""Tensors in safetensors files with deterministic bytes, taken to the host one at a time.

The library wants all of them there at once: a full checkpoint of a 12 B model would need 70 GiB.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from trainer.files import atomic, safetensors

DTYPES: Mapping[str, torch.dtype] = {name: vars(torch)[theirs] for name, theirs in safetensors.DTYPES.items()}
"""Types of safetensors that torch has, by their names in headers."""

_MOST_BEHIND = 4
"""Tensors on the host that are written and wait to be hashed."""


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    on_tensor: Callable[[], None] | None,
) -> str:
    """Write tensors from any device to `path`, sorted by name, and sync it; `on_tensor` runs after each.

    Gives the file's SHA-256. Raises StorageError when it cannot be written; nothing is left of it then.
    """
    rows = [(name, tensors[name]) for name in sorted(tensors)]
    entries = safetensors.entries((name, str(one.dtype), one.shape, one.nbytes) for name, one in rows)
    head = safetensors.head(entries, metadata)
    digest = hashlib.sha256(head)

    def buffers() -> Iterator[memoryview]:
        behind: deque[Future[None]] = deque()
        for _, tensor in rows:
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


def split_shards(tensors: Mapping[str, torch.Tensor], limit_bytes: int) -> list[dict[str, torch.Tensor]]:
    """Group tensors by name order into shards of at most `limit_bytes`; a larger tensor gets its own."""
    shards: list[dict[str, torch.Tensor]] = [{}]
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
