"""Floor 4: what scanning a data set gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Control:
    """One image before the edit; sizes are pixels after EXIF orientation."""

    path: Path
    width: int
    height: int
    content_sha256: str


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
    controls: tuple[Control, ...] = ()

    def crops_alike(self, control: Control) -> bool:
        """Whether a control is cut as the image is: of equal size, the two show the same things."""
        return (control.width, control.height) == (self.width, self.height)


@dataclass(frozen=True, kw_only=True)
class ChatRecord:
    """One conversation, checked to have an answer to learn from."""

    path: Path
    """The file, with the row: `chats.jsonl:17`."""
    identifier: str
    """Position and row within the sets: `0/17`."""
    caption: str
    """The conversation as JSON: a list of {"role", "content"}."""
    repeats: int
    content_sha256: str
    """Hash of `caption`."""
    controls: tuple[Control, ...] = ()


Record = ImageRecord | ChatRecord
