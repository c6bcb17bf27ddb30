"""Safetensors files that carry a checksum and are compared with it when they are read.

Tensors lie in the order in which the library writes them. Headers are read without torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    order = sorted((_ORDER[str(one.dtype)], name) for name, one in tensors.items())
    rows = [(name, tensors[name]) for _, name in order]
    entries = safetensors.entries((name, str(one.dtype), one.shape, one.nbytes) for name, one in rows)
    buffers = [one.contiguous().reshape(-1).view(torch.uint8).numpy().data for _, one in rows]
    checksum = _checksum(entries, metadata, buffers)
    with atomic.writing(path) as file:
        file.write(safetensors.head(entries, {**metadata, _CHECKSUM: checksum}))
        file.writelines(buffers)


def read_header(file: Path | bytes) -> tuple[Header, str]:
    """(the header without its checksum, the checksum) of a file, or of all of its bytes.

    Raises DamagedFileError when the header or the file's size are wrong.
    """
    content, size = (io.BytesIO(file), len(file)) if isinstance(file, bytes) else (file, file.stat().st_size)
    try:
        header = safetensors.read_header(content)
        metadata = dict(header.metadata)
        checksum = metadata.pop(_CHECKSUM)
    except HeaderCutOffError as error:
        raise DamagedFileError("its header is cut off") from error
    except (HeaderError, KeyError) as error:
        raise DamagedFileError("its header is not valid") from error
    if size != header.end:
        raise DamagedFileError(f"{size} bytes instead of {header.end}")
    return dataclasses.replace(header, metadata=metadata), checksum


def verify(path: Path) -> bytes:
    """The whole file, compared with its checksum. Raises DamagedFileError."""
    data = path.read_bytes()
    header, checksum = read_header(data)
    if _checksum(header.tensors, header.metadata, [memoryview(data)[header.start :]]) != checksum:
        raise DamagedFileError("its checksum is wrong")
    return data


def _checksum(entries: Mapping[str, Any], metadata: Mapping[str, str], buffers: Iterable[memoryview]) -> str:
    """SHA-256 of the header without the checksum itself, and of the tensors' bytes."""
    digest = hashlib.sha256(safetensors.canonical({**entries, "__metadata__": dict(metadata)}))
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()
