"""Data sets as pages show them: the list, one set with its grid, one picture, a replacement to look at."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from trainer.data.caption_text import with_trigger_word
from trainer.data.sets.listing import NO_IMAGE
from trainer.data.sets.look import Picture
from trainer.errors import DataError
from trainer.ui.datasets import edits, snapshot, worker
from trainer.ui.datasets.places import WHOLE_ROOT, Place, folders, place_of, places
from trainer.ui.studio import Studio, identifier

TILES = 60
"""Pictures of one page of the grid."""
_START_NANOSECONDS = 30 * 10**9
"""Time in which a worker has begun, on a busy machine too."""
FILTERS: Mapping[str, tuple[str, Callable[[Picture, float], bool]]] = {
    "all": ("All", lambda one, most: True),
    "problems": ("Problems", lambda one, most: bool(one.problem)),
    "no-caption": ("No caption", lambda one, most: not one.caption),
    "small": ("Small", lambda one, most: one.enlarged > 1),
    "copies": ("Copies", lambda one, most: bool(one.copy_of)),
    "long": ("Long caption", lambda one, most: len(one.caption.encode()) > most),
}
"""Titles and conditions of filters; the number is how many bytes of a caption are read."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One data set of the list."""

    place: Place
    is_looking: bool
    pictures: int | None
    """None where it was not looked at yet."""
    problems: int
    """Files that a run would not take."""


@dataclass(frozen=True, kw_only=True)
class LookView:
    """Looks at a data set: the last one, and one that goes on."""

    place: Place
    looked: bool
    """Whether there was a look that opened all pictures."""
    is_looking: bool
    """Whether one goes on, or is about to."""
    failed: bool
    """Whether one was asked for and ended without an answer."""
    is_old: bool
    """Whether files came, went or were renamed in the folder since it was last looked at."""
    progress: snapshot.Progress | None


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One picture of the grid, its caption as it is on the disk now."""

    id: str
    name: str
    """Within the data set."""
    picture: Picture
    caption: str
    etag: str
    locked: str
    """Why the caption cannot be edited here; else empty."""


@dataclass(frozen=True, kw_only=True)
class DatasetView:
    """One data set: which pictures are shown, and the numbers of all."""

    place: Place
    look: LookView
    settings: snapshot.Settings
    families: Mapping[str, str]
    """Titles of families that are trained on pictures, by name."""
    folders: Mapping[str, str]
    """Names by id of folders in which masks or control images may lie."""
    counts: Mapping[str, int]
    """Pictures by filter."""
    buckets: Mapping[tuple[int, int], int]
    """Usable pictures by width and height that they are trained at."""
    alone: int
    """Pictures that are the only one of their bucket, and fill no batch with another."""
    strays: Sequence[tuple[str, str]]
    """Files that a run would not take, and why; that an empty folder has no picture is none."""
    trained: bool
    """Whether a run may name the folder: not where it is the root of all data sets."""
    in_metadata: int
    """Captions that are rows of metadata."""
    undo: tuple[str, str] | None
    """Id of the change that undo takes back, and words for it; None where there is none."""
    show: str
    search: str
    bucket: str
    page: int
    pages: int
    tiles: Sequence[Tile]


@dataclass(frozen=True, kw_only=True)
class PictureView:
    """One picture with what is made of it."""

    place: Place
    tile: Tile
    trained_caption: str
    """With the trigger word."""
    before: str
    """Id of the picture before; empty for the first."""
    after: str


@dataclass(frozen=True, kw_only=True)
class ReplaceView:
    """A replacement, to be looked at before it is made."""

    place: Place
    find: str
    replace: str
    found: Mapping[str, tuple[str, str, str]]
    """Text now, text then and ETag by the name of each caption's file."""
    seen: str
    """Hash of all of it: what is made is what was looked at."""


def datasets_view(studio: Studio) -> list[Row]:
    """All data sets of the studio. Raises DataError where their root cannot be read."""
    rows = []
    for place in places(studio):
        found = snapshot.read_snapshot(place)
        rows.append(
            Row(
                place=place,
                is_looking=worker.is_looking(place),
                pictures=len(found.pictures) if found else None,
                problems=sum(bool(one.problem) for one in found.pictures) + len(found.strays) if found else 0,
            )
        )
    return rows


def look_view(studio: Studio, given: str) -> LookView:
    """The looks at one data set. Raises UnknownIdError."""
    place = place_of(studio, given)
    latest, asked = snapshot.read_snapshot(place), worker.last_request(place)
    is_open = asked > (latest.asked if latest else 0)
    is_new = asked > time.time_ns() - _START_NANOSECONDS
    is_looking = worker.is_looking(place) or (is_open and is_new)
    return LookView(
        place=place,
        looked=latest is not None and latest.complete,
        is_looking=is_looking,
        failed=is_open and not is_looking,
        is_old=latest is None or latest.folder_changed != place.folder.stat().st_mtime_ns,
        progress=snapshot.read_progress(place) if is_looking else None,
    )


def dataset_view(
    studio: Studio, given: str, *, show: str = "all", search: str = "", bucket: str = "", page: int = 1
) -> DatasetView:
    """One data set by its id; `show` names a filter, `bucket` a size such as 1024x1024, `page` counts from 1.

    Raises UnknownIdError.
    """
    place = place_of(studio, given)
    latest, settings = snapshot.read_snapshot(place), snapshot.read_settings(place)
    pictures = snapshot.pictures_by_id(place)
    show, most = show if show in FILTERS else "all", settings.caption_bytes
    shown = [
        key
        for key, one in pictures.items()
        if FILTERS[show][1](one, most)
        and (not bucket or bucket == f"{one.bucket[0]}x{one.bucket[1]}")
        and (not search or search.casefold() in f"{one.name}\n{one.caption}".casefold())
    ]
    pages = max(1, math.ceil(len(shown) / TILES))
    page = min(max(1, page), pages)
    rows = pictures.values()
    buckets = Counter(one.bucket for one in rows if one.sha256 and not one.problem)
    return DatasetView(
        place=place,
        look=look_view(studio, given),
        settings=settings,
        families={family.name: family.title for family in snapshot.picture_families()},
        folders={
            identifier(studio.data, studio.data / name): name
            for name in folders(studio)
            if name != place.name
        },
        counts={name: sum(test(one, most) for one in rows) for name, (_, test) in FILTERS.items()},
        buckets=dict(sorted(buckets.items())),
        alone=sum(count == 1 for count in buckets.values()),
        strays=_strays(place, latest.strays if latest else ()),
        trained=place.name != WHOLE_ROOT,
        in_metadata=sum(bool(one.caption) and not one.in_file for one in rows),
        undo=edits.last_change(place),
        show=show,
        search=search,
        bucket=bucket,
        page=page,
        pages=pages,
        tiles=[tile_view(place, key) for key in shown[(page - 1) * TILES : page * TILES]],
    )


def _strays(place: Place, found: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [one for one in found if not (one[0] == place.name and one[1].startswith(NO_IMAGE))]


def tile_view(place: Place, key: str) -> Tile:
    """One picture of the grid by its id. Raises UnknownIdError."""
    picture, locked = snapshot.picture_of(place, key), ""
    caption = edits.Caption(text=picture.caption, etag="")
    try:
        caption = edits.caption_now(place, edits.caption_file(picture))
    except DataError as error:
        locked = error.problems[0].what
    name = PurePosixPath(picture.name).relative_to(place.name).as_posix()
    return Tile(id=key, name=name, picture=picture, caption=caption.text, etag=caption.etag, locked=locked)


def picture_view(studio: Studio, given: str, picture: str) -> PictureView:
    """One picture by its id and that of its data set. Raises UnknownIdError."""
    place = place_of(studio, given)
    tile, keys = tile_view(place, picture), ["", *snapshot.pictures_by_id(place), ""]
    index = keys.index(picture)
    return PictureView(
        place=place,
        tile=tile,
        trained_caption=with_trigger_word(tile.caption, snapshot.read_settings(place).trigger_word),
        before=keys[index - 1],
        after=keys[index + 1],
    )


def replace_view(studio: Studio, given: str, find: str, replace: str) -> ReplaceView:
    """Captions that a replacement would change, as they are on the disk now. Raises UnknownIdError."""
    place = place_of(studio, given)
    found = edits.replaced(place, snapshot.pictures_by_id(place).values(), find, replace)
    seen = hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()
    return ReplaceView(place=place, find=find, replace=replace, found=found, seen=seen)
