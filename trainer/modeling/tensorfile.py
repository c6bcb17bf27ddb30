"""Floor 4: safetensors files with deterministic bytes, written one tensor at a time.

The safetensors library writes its header in random key order and wants every tensor in host memory at once;
a full
checkpoint of a 12 B model would need 70 GiB of it. The format is eight bytes of header length, a JSON header
and the
raw tensors (https://github.com/huggingface/safetensors#format), so writing it in order is all there is to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.errors import NoSpaceError
from trainer.telemetry.atomic import no_space_told

_DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    on_tensor: Callable[[], None] | None,
) -> None:
    """Write tensors from any device to `path`, sorted by name, and sync it; `on_tensor` runs after each.

    Raises NoSpaceError when the disk fills; a partial file is then left for the caller to remove.
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
    with no_space_told(path), path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in names:
            file.write(_raw_bytes(tensors[name]))
            if on_tensor is not None:
                on_tensor()
        file.flush()
        os.fsync(file.fileno())


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
    except NoSpaceError:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)


def _raw_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's bytes in row-major order, on the CPU, as a buffer."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
