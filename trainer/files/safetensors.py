"""The safetensors format: one reader of headers, and one maker of them, equal for equal tensors.

A file is eight bytes of header length, little endian, a JSON header and the raw tensors
(https://github.com/huggingface/safetensors#format). The library writes its header in random key order and
wants every tensor in host memory at once; here keys are sorted, and a header does not need the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

DTYPES: Mapping[str, str] = {
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
    "F32": "float32", "U32": "uint32", "I32": "int32",
    "BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""torch's name of each type that torch has, by its name in headers; in the order in which the library writes
tensors.
"""
_NAMES = {f"torch.{theirs}": name for name, theirs in DTYPES.items()}
_LENGTH_BYTES = 8
# a header of a real model has some 100 kB; the library refuses more than this
_MOST_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
UNREADABLE = "copy or download it again: it was cut off, or is no .safetensors file"
"""Remedy for a file that cannot be read."""


class HeaderError(Exception):
    """The file does not begin with a safetensors header; the text says why."""


class HeaderCutOffError(HeaderError):
    """The file ends inside of its header."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """A file's header."""

    tensors: Mapping[str, Mapping[str, Any]]
    """Entries by name: `dtype`, `shape`, and `data_offsets`, begin and end in bytes counted from `start`."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes by name, sorted."""
    metadata: Mapping[str, str]
    start: int
    """Byte of the file that the first tensor begins at."""
    end: int
    """Bytes that the whole file must have."""


def read_header(file: Path | BinaryIO) -> Header:
    """The header of a file, or of a stream at its beginning. Raises OSError, HeaderError."""
    if isinstance(file, Path):
        with file.open("rb") as stream:
            return read_header(stream)
    raw = file.read(_LENGTH_BYTES)
    length = int.from_bytes(raw, "little")
    if length > _MOST_HEADER_BYTES:
        raise HeaderCutOffError(f"header of {length} bytes")
    text = file.read(length)
    if len(raw) < _LENGTH_BYTES or len(text) < length:
        raise HeaderCutOffError("its header is cut off")
    start = _LENGTH_BYTES + length
    try:
        tensors: dict[str, Any] = json.loads(text)
        metadata = dict(tensors.pop(_METADATA, {}))
        shapes = {name: tuple(entry["shape"]) for name, entry in sorted(tensors.items())}
        end = start + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise HeaderError(str(error)) from error
    return Header(tensors=tensors, shapes=shapes, metadata=metadata, start=start, end=end)


def entries(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> dict[str, Any]:
    """Header entries of tensors whose bytes follow each other in the file.

    Each is given as (name, torch's type as text, shape, bytes).
    """
    found: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape, size in tensors:
        offsets = [offset, offset + size]
        found[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
        offset += size
    return found


def canonical(content: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and no blanks."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def head(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """The length and JSON of the header, padded with blanks to a multiple of eight bytes."""
    header = canonical({**tensors, _METADATA: dict(metadata)} if metadata else tensors)
    header += b" " * (-len(header) % _LENGTH_BYTES)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header
