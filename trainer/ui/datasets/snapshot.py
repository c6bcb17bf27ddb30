"""Data sets as they were looked at last: pictures with captions, buckets and problems, kept as JSON."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer import families
from trainer.config.schema import DataSection, DataSet
from trainer.data.pictures.images import Measured
from trainer.data.sets.look import Picture
from trainer.data.sets.scan import Found, find_images
from trainer.errors import HardwareError
from trainer.families.family import Family
from trainer.files import atomic, codec
from trainer.planning.epochs import BYTES_A_TOKEN
from trainer.ui.datasets.places import Place
from trainer.ui.studio import UnknownIdError, identifier

SETTINGS_NAME, SNAPSHOT_NAME = "settings.json", "snapshot.json"
PROGRESS_NAME, OPENED_NAME = "progress.json", "opened.json"
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Answers that buckets and problems depend on, as a run's configuration would give them."""

    family: str
    resolution: int = DataSection.model_fields["resolution"].default
    """Side in pixels of the square whose area buckets keep to."""
    trigger_word: str = ""
    mask: str = ""
    """Folder of masks below the root of data sets, or nothing."""
    controls: tuple[str, ...] = ()
    """Folders of control images below the root of data sets."""

    @property
    def model(self) -> Family:
        """The model family."""
        return families.get(self.family)

    @property
    def caption_bytes(self) -> float:
        """Bytes of a caption that are likely to be read, unless a run's configuration says otherwise."""
        tokens: int = DataSection.model_fields["max_sequence_length"].default
        return min(tokens, self.model.max_sequence_length) * BYTES_A_TOKEN


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that a look at a data set found."""

    complete: bool = False
    """Whether the pictures were opened, not only listed."""
    asked: int = 0
    """Nanoseconds: which request to look it answers."""
    folder_changed: int = 0
    """Nanoseconds: the folder's time of change before it was listed."""
    pictures: tuple[Picture, ...] = ()
    strays: tuple[tuple[str, str], ...] = ()
    """Files that are no picture, and what is wrong with each."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Files that were good when they were opened."""

    files: Mapping[str, tuple[tuple[int, int, int, bool], Measured]]
    """By path: size, times of change (of the content, of anything) in nanoseconds, whether it was opened as a
    mask; and what it holds.
    """


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Pictures that a look has opened so far, and all of them."""

    done: int
    total: int


def picture_families() -> list[Family]:
    """Families that are trained on pictures."""
    found = [families.get(name) for name in families.names()]
    return [family for family in found if family.sample_kind == "image"]


def read_settings(place: Place) -> Settings:
    """Settings of a data set; those of a plain one where none were made, or by another version."""
    found, known = _kept(Settings, place.state / SETTINGS_NAME), [one.name for one in picture_families()]
    return found if found is not None and found.family in known else Settings(family=known[0])


def listed(place: Place, settings: Settings) -> Found:
    """Pictures of a data set with their captions as they are on the disk now; none is opened."""
    masks = place.root / settings.mask if settings.mask else None
    controls = tuple(place.root / name for name in settings.controls) or None
    one = DataSet(img_dir=place.folder, mask_dir=masks, control_dir=controls)
    return find_images([one], settings.model.control_counts)


def read_snapshot(place: Place) -> Snapshot | None:
    """Latest look at a data set; None where there was none, or by another version."""
    return _latest(place)[0]


def pictures_by_id(place: Place) -> Mapping[str, Picture]:
    """Pictures of the latest look by their ids in URLs, in order of name."""
    return _latest(place)[1]


def picture_of(place: Place, given: str) -> Picture:
    """The picture of an id. Raises UnknownIdError."""
    found = pictures_by_id(place).get(given)
    if found is None:
        raise UnknownIdError(given)
    return found


def read_progress(place: Place) -> Progress | None:
    """Progress of the look that goes on, or of the last one."""
    return _kept(Progress, place.state / PROGRESS_NAME)


def read_opened(place: Place) -> Opened:
    """Files that the latest look found good; none where there was no look."""
    return _kept(Opened, place.state / OPENED_NAME) or Opened(files={})


def keep(place: Place, name: str, value: object) -> None:
    """Write a value under one of the names above; other processes never see half of it."""
    place.state.mkdir(parents=True, exist_ok=True)
    atomic.write_text(place.state / name, codec.to_json(value), sync=False)


def _latest(place: Place) -> tuple[Snapshot | None, Mapping[str, Picture]]:
    path = place.state / SNAPSHOT_NAME
    try:
        return _read(place.root, path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None, {}


@functools.lru_cache(maxsize=8)
def _read(root: Path, path: Path, changed: int) -> tuple[Snapshot | None, Mapping[str, Picture]]:
    """A snapshot with its pictures by id, read once as long as its file is the same."""
    snapshot = _kept(Snapshot, path)
    rows = snapshot.pictures if snapshot else ()
    return snapshot, {identifier(root, root / one.name): one for one in rows}


def _kept(kind: type[Value], path: Path) -> Value | None:
    """The value in a file of the studio's own; None where there is none, or of another version."""
    try:
        return codec.from_json(kind, path.read_text(), str(path))
    except (FileNotFoundError, HardwareError):
        return None
