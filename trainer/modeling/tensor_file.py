"""Safetensors files with deterministic bytes, written one tensor at a time.

The safetensors library writes its header in random key order and wants every tensor in host memory at once;
a full
checkpoint of a 12 B model would need 70 GiB of it. The format is eight bytes of header length, a JSON header
and the
raw tensors (https://github.com/huggingface/safetensors#format), so writing it in order is all there is to do.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trainer.errors import StorageError
from trainer.files.atomic import no_space_told

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of safetensors that torch has, by their names in headers."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MOST_BEHIND = 4
"""Tensors on the host that are written and wait to be hashed."""


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    on_tensor: Callable[[], None] | None,
) -> str:
    """Write tensors from any device to `path`, sorted by name, and sync it; `on_tensor` runs after each.

    Gives the file's SHA-256. Raises StorageError when it cannot be written; a partial file is then left for
    the caller to remove.
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    names = sorted(tensors)
    for name in names:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    encoded += b" " * (-len(encoded) % 8)
    with no_space_told(path), path.open("wb") as file, ThreadPoolExecutor(max_workers=1) as pool:
        head = len(encoded).to_bytes(8, "little") + encoded
        file.write(head)
        digest = hashlib.sha256(head)
        behind: deque[Future[None]] = deque()
        for name in names:
            raw = _raw_bytes(tensors[name])
            # both let go of the interpreter: a file is hashed while it is written and synced
            behind.append(pool.submit(digest.update, raw))
            file.write(raw)
            if len(behind) > _MOST_BEHIND:
                behind.popleft().result()
            if on_tensor is not None:
                on_tensor()
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def split_shards(tensors: Mapping[str, torch.Tensor], limit_bytes: int) -> list[dict[str, torch.Tensor]]:
    """Group tensors by name order into shards of at most `limit_bytes`; a larger tensor gets its own."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name in sorted(tensors):
        size = tensors[name].numel() * tensors[name].element_size()
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
    temporary = path.with_name(path.name + ".tmp")
    try:
        write_tensors(temporary, tensors, metadata, None)
    except StorageError:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)


def _raw_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's bytes in row-major order, on the CPU, as a buffer."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
