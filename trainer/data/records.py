"""Floor 4: what scanning a data set gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """One captioned image, checked to be readable, with the bucket it is trained at.

    Sizes are pixels after EXIF orientation. `caption` already carries the trigger word.
    """

    path: Path
    identifier: str
    """Position and file name within the sets, stable and free of absolute paths: `0/cat.png`."""
    caption: str
    width: int
    height: int
    bucket_width: int
    bucket_height: int
    repeats: int
    content_sha256: str
    """Hash of the file's bytes."""
