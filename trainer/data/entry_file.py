"""Safetensors files that are equal for equal tensors, carry a checksum and are checked when read.

The library writes its header in random key order; here it is rewritten with sorted keys. The format is eight
bytes of header length, a JSON header and the raw tensors (https://github.com/huggingface/safetensors#format),
so headers are read without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.files import atomic

if TYPE_CHECKING:
    import torch

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1024**2
_CHECKSUM = "sha256"


class DamagedFileError(Exception):
    """The file is not what was written: cut off, altered, or another one."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file says of itself."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes by tensor name."""
    metadata: Mapping[str, str]
    """Texts that were given to the writer."""
    file_bytes: int
    """Size that the whole file must have."""
    checksum: str
    """SHA-256 of the header without this entry, and the tensors' bytes."""


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write `path` atomically, with the same bytes for the same tensors and metadata. Raises NoSpaceError."""
    import safetensors.torch

    raw = safetensors.torch.save({name: tensors[name].contiguous() for name in sorted(tensors)})
    start = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    content = memoryview(raw)[start:]
    entries: dict[str, Any] = json.loads(raw[_LENGTH_BYTES:start])
    entries["__metadata__"] = dict(metadata)
    entries["__metadata__"][_CHECKSUM] = _checksum(entries, content)
    header = _canonical(entries)
    header += b" " * (-len(header) % _LENGTH_BYTES)
    with atomic.writing(path) as file:
        file.write(len(header).to_bytes(_LENGTH_BYTES, "little"))
        file.write(header)
        file.write(content)


def read_header(path: Path) -> Header:
    """Shapes and metadata, without torch. Raises DamagedFileError when header or file size are wrong."""
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        header, _ = _parse(length, file.read(min(int.from_bytes(length, "little"), _MAX_HEADER_BYTES)))
        size = os.fstat(file.fileno()).st_size
    if size != header.file_bytes:
        raise DamagedFileError(f"{size} bytes instead of {header.file_bytes}")
    return header


def verify(path: Path) -> None:
    """Read the whole file and compare its checksum. Raises DamagedFileError."""
    _checked_bytes(path)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors, on the CPU. Raises DamagedFileError unless every byte is as it was written."""
    import safetensors.torch

    return safetensors.torch.load(_checked_bytes(path))


def _checked_bytes(path: Path) -> bytes:
    """The file's bytes after comparing size and checksum."""
    data = path.read_bytes()
    header, entries = _parse(data[:_LENGTH_BYTES], data[_LENGTH_BYTES : _LENGTH_BYTES + _MAX_HEADER_BYTES])
    if len(data) != header.file_bytes:
        raise DamagedFileError(f"{len(data)} bytes instead of {header.file_bytes}")
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if _checksum(entries, memoryview(data)[start:]) != header.checksum:
        raise DamagedFileError("its checksum is wrong")
    return data


def _parse(length: bytes, start: bytes) -> tuple[Header, dict[str, Any]]:
    """The header, and its JSON as read, from the file's first eight bytes and what follows them."""
    header_bytes = int.from_bytes(length, "little")
    if len(length) < _LENGTH_BYTES or header_bytes > len(start):
        raise DamagedFileError("its header is cut off")
    try:
        entries: dict[str, Any] = json.loads(start[:header_bytes])
        metadata: dict[str, str] = dict(entries["__metadata__"])
        tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        content_bytes = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        header = Header(
            shapes={name: tuple(entry["shape"]) for name, entry in sorted(tensors.items())},
            checksum=metadata.pop(_CHECKSUM),
            metadata=metadata,
            file_bytes=_LENGTH_BYTES + header_bytes + content_bytes,
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedFileError("its header is not valid") from error
    return header, entries


def _checksum(entries: Mapping[str, Any], content: memoryview) -> str:
    """SHA-256 of the header without the checksum itself, and of the tensors' bytes."""
    metadata = {name: text for name, text in entries["__metadata__"].items() if name != _CHECKSUM}
    digest = hashlib.sha256(_canonical({**entries, "__metadata__": metadata}))
    digest.update(content)
    return digest.hexdigest()


def _canonical(entries: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and no blanks."""
    return json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()
