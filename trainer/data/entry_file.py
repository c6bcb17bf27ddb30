"""Safetensors files that carry a checksum and are compared with it when they are read.

Tensors lie in the order in which the library writes them. Headers are read without torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainer.files import atomic, safetensors
from trainer.files.safetensors import Header, HeaderCutOffError, HeaderError

if TYPE_CHECKING:
    import torch

_CHECKSUM = "sha256"
_ORDER = {f"torch.{name}": place for place, name in enumerate(safetensors.DTYPES.values())}


class DamagedFileError(Exception):
    """The file is not what was written: cut off, altered, or another one."""


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write `path` atomically, with the same bytes for the same tensors and metadata. Raises NoSpaceError."""
    import torch

    rows = sorted(tensors.items(), key=lambda row: (_ORDER[str(row[1].dtype)], row[0]))
    entries = safetensors.entries((name, str(one.dtype), one.shape, one.nbytes) for name, one in rows)
    buffers = [one.contiguous().reshape(-1).view(torch.uint8).numpy().data for _, one in rows]
    checksum = _checksum(entries, metadata, buffers)
    with atomic.writing(path) as file:
        file.write(safetensors.head(entries, {**metadata, _CHECKSUM: checksum}))
        file.writelines(buffers)


def read_header(path: Path) -> Header:
    """The header without its checksum. Raises DamagedFileError when it or the file's size are wrong."""
    return _parsed(path, path.stat().st_size)[0]


def verify(path: Path) -> bytes:
    """The whole file, compared with its checksum. Raises DamagedFileError."""
    data = path.read_bytes()
    header, checksum = _parsed(io.BytesIO(data), len(data))
    if _checksum(header.tensors, header.metadata, [memoryview(data)[header.start :]]) != checksum:
        raise DamagedFileError("its checksum is wrong")
    return data


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors, on the CPU. Raises DamagedFileError unless every byte is as it was written."""
    from safetensors.torch import load

    return load(verify(path))


def _parsed(file: Path | BinaryIO, size: int) -> tuple[Header, str]:
    """(the header, its checksum) of a file of `size` bytes."""
    try:
        header = safetensors.read_header(file)
        metadata = dict(header.metadata)
        checksum = metadata.pop(_CHECKSUM)
    except HeaderCutOffError as error:
        raise DamagedFileError("its header is cut off") from error
    except (HeaderError, KeyError) as error:
        raise DamagedFileError("its header is not valid") from error
    if size != header.end:
        raise DamagedFileError(f"{size} bytes instead of {header.end}")
    return dataclasses.replace(header, metadata=metadata), checksum


def _checksum(entries: Mapping[str, Any], metadata: Mapping[str, str], buffers: Iterable[memoryview]) -> str:
    """SHA-256 of the header without the checksum itself, and of the tensors' bytes."""
    digest = hashlib.sha256(safetensors.canonical({**entries, "__metadata__": dict(metadata)}))
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()
