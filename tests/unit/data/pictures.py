"""Small pictures and folders for the data tests."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from trainer.config.schema import DataSet
from trainer.data.records import ImageRecord
from trainer.data.sets.scan import scan_images


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """RGB noise, which no encoder can make small."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def encoded(image: Image.Image, image_format: str = "PNG") -> bytes:
    """The file's bytes in one format."""
    buffer = io.BytesIO()
    image.save(buffer, image_format)
    return buffer.getvalue()


def bomb() -> bytes:
    """A png of a few bytes that claims 40000x40000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 40000, 40000, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def twelve_bit_tiff(values: np.ndarray) -> bytes:
    """An uncompressed grey TIFF of 12 bits, two pixels in three bytes; PIL reads it as 16 and writes none."""
    height, width = values.shape
    pairs = values.reshape(-1, 2).astype(np.uint32)
    data = b"".join(int(left << 12 | right).to_bytes(3, "big") for left, right in pairs)
    tags = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: len(data)}
    entries = b"".join(
        struct.pack("<HHII", tag, 4 if tag in (273, 279) else 3, 1, value) for tag, value in tags.items()
    )
    head = b"II*\0" + struct.pack("<I", 8 + len(data))
    return head + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def write_pair(folder: Path, name: str, caption: str = "a thing", *, seed: int = 0) -> Path:
    """An image with its sidecar caption."""
    path = folder / name
    suffix = path.suffix.lower().removeprefix(".")
    path.write_bytes(encoded(picture(seed=seed), {"jpg": "JPEG"}.get(suffix, suffix.upper())))
    path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def write_rows(folder: Path, rows: Sequence[object]) -> Path:
    """A metadata.jsonl; a text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path = folder / "metadata.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def scan(
    *folders: Path,
    trigger_word: str | None = None,
    resolution: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ImageRecord, ...]:
    """Scan folders as sets of one run; the first set has one repeat, the next one two."""
    sets = [DataSet(img_dir=folder, repeats=index + 1) for index, folder in enumerate(folders)]
    options = {"resolution": resolution, "multiple": 16, "trigger_word": trigger_word}
    return tuple(scan_images(sets, **options, progress=progress).records)  # type: ignore[arg-type]


def record(index: int, content: str | None = None) -> ImageRecord:
    """A record without a file."""
    return ImageRecord(
        path=Path(f"/set/{index}.png"),
        identifier=f"0/{index}.png",
        caption=f"thing {index}",
        width=64,
        height=64,
        bucket_width=64,
        bucket_height=64,
        repeats=1,
        content_sha256=content or f"{index:064x}",
    )
