"""Samples and left-out files that scanning a data set finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class View:
    """Crop and mirroring of an image for its bucket; the default is the centred crop."""

    flip: bool = False
    """Mirrored, left for right."""
    place: tuple[float, float] = (0.5, 0.5)
    """Place of the crop within the leftover, across and down, from 0 to 1."""

    @property
    def key(self) -> str:
        """A text that tells two views of one image apart; empty for the default."""
        parts = [] if self.place == (0.5, 0.5) else [f"place {self.place[0]:.6f} {self.place[1]:.6f}"]
        return " ".join([*parts, *(["flip"] if self.flip else [])])


CENTRED = View()


@dataclass(frozen=True, kw_only=True)
class Control:
    """One image before the edit; sizes are pixels after EXIF orientation."""

    path: Path
    width: int
    height: int
    content_sha256: str
    colour: str = ""
    """Conversion of its colours to sRGB, on which its pixels depend; empty where it is the usual one."""


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Loss mask of a sample: white counts, black does not. It has the image's aspect, and any size."""

    path: Path
    content_sha256: str
    depth: str = ""
    """Conversion of its values to eight bits, on which they depend; empty where it is the usual one."""

    @property
    def key(self) -> Mapping[str, str]:
        """Identity of its values."""
        return {"mask": self.content_sha256} | ({"mask_depth": self.depth} if self.depth else {})


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """One captioned image, checked to be readable, with the bucket it is trained at.

    Sizes are pixels after EXIF orientation. `caption` already carries the trigger word.
    """

    path: Path
    identifier: str
    """Position and file name within the sets, stable and free of absolute paths: `0/cat.png`,
    `0/pets/cat.png`."""
    caption: str
    width: int
    height: int
    bucket_width: int
    bucket_height: int
    repeats: int
    content_sha256: str
    """Hash of the file's bytes."""
    controls: tuple[Control, ...] = ()
    colour: str = ""
    """Conversion of its colours to sRGB, like in `Control`."""
    set_index: int = 0
    view: View = CENTRED
    mask: Mask | None = None
    loss_weight: float = 1.0
    """Factor on the sample's loss."""
    is_reg: bool = False
    """Whether the image is of a regularisation set: it gets no trigger word and is never held out."""


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


LeftOut = tuple[str, str]
"""A file that is not trained on because of `data.on_bad_file` or `data.on_long`, and why: a sample's or a
stray one, a conversation's with its row.
"""


@dataclass(frozen=True, kw_only=True)
class Scan:
    """The samples of all sets, in order of set and name, and what was left out of them."""

    records: Sequence[Record]
    left_out: tuple[LeftOut, ...] = ()
