"""Data sets as pages show them: the list, one set with its grid, one picture, a replacement to look at."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from trainer.data.captions import with_trigger_word
from trainer.errors import DataError
from trainer.ui.datasets import edits, worker
from trainer.ui.datasets.places import Place, folders, place_of, places
from trainer.ui.datasets.snapshot import (
    TOKENS,
    Picture,
    Progress,
    Settings,
    Summary,
    picture_families,
    picture_of,
    pictures_by_id,
    read_progress,
    read_settings,
    read_snapshot,
    read_summary,
)
from trainer.ui.studio import Studio, identifier

TILES = 60
"""Pictures of one page of the grid."""
STRAYS_SHOWN = 50
_START_NANOSECONDS = 30 * 10**9
"""Time in which a worker has begun, on a busy machine too."""
FILTERS: Mapping[str, tuple[str, Callable[[Picture, int], bool]]] = {
    "all": ("All", lambda one, tokens: True),
    "problems": ("Problems", lambda one, tokens: bool(one.problems)),
    "no-caption": ("No caption", lambda one, tokens: not one.caption),
    "small": ("Small", lambda one, tokens: one.enlarged > 1),
    "copies": ("Copies", lambda one, tokens: bool(one.copy_of)),
    "long": ("Long caption", lambda one, tokens: one.is_long(tokens)),
}
"""Titles and conditions of filters; the number is how many tokens of a caption count."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One data set of the list."""

    id: str
    name: str
    summary: Summary | None
    """None where it was not looked at yet."""
    is_looking: bool
    writable: bool


@dataclass(frozen=True, kw_only=True)
class LookView:
    """Looks at a data set: the last one, and one that goes on."""

    set_id: str
    looked: bool
    """Whether there was a look that opened all pictures."""
    is_looking: bool
    """Whether one goes on, or is about to."""
    failed: bool
    """Whether one was asked for and ended without an answer."""
    is_old: bool
    """Whether files came, went or were renamed in the folder since it was last looked at."""
    progress: Progress | None


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bucket of the histogram."""

    width: int
    height: int
    pictures: int


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
    is_long: bool


@dataclass(frozen=True, kw_only=True)
class DatasetView:
    """One data set: which pictures are shown, and the numbers of all."""

    id: str
    name: str
    folder: str
    writable: bool
    settings: Settings
    families: Sequence[tuple[str, str]]
    """Names and titles of families that are trained on pictures."""
    folders: Sequence[tuple[str, str]]
    """Ids and names of folders in which masks or control images may lie."""
    look: LookView
    counts: Mapping[str, int]
    """Pictures by filter."""
    bars: Sequence[Bar]
    alone: int
    """Pictures that are the only one of their bucket, and fill no batch with another."""
    strays: Sequence[tuple[str, str]]
    more_strays: int
    in_metadata: int
    """Captions that are rows of metadata."""
    undo: str
    """The change that undo takes back; empty where there is none."""
    show: str
    search: str
    bucket: str
    page: int
    pages: int
    found: int
    tiles: Sequence[Tile]


@dataclass(frozen=True, kw_only=True)
class PictureView:
    """One picture with what is made of it."""

    set_id: str
    set_name: str
    writable: bool
    tile: Tile
    trained_caption: str
    """With the trigger word."""
    before: str
    """Id of the picture before; empty for the first."""
    after: str


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """One caption that a replacement changes."""

    name: str
    now: str
    then: str


@dataclass(frozen=True, kw_only=True)
class ReplaceView:
    """A replacement, to be looked at before it is made."""

    set_id: str
    set_name: str
    writable: bool
    find: str
    replace: str
    rows: Sequence[Replacement]
    seen: str
    """Hash of all rows: what is made is what was looked at."""


def datasets_view(studio: Studio) -> list[Row]:
    """All data sets of the studio. Raises DataError where their root cannot be read."""
    return [
        Row(
            id=place.id,
            name=_title(place),
            summary=read_summary(place),
            is_looking=worker.is_looking(place),
            writable=place.writable,
        )
        for place in places(studio)
    ]


def look_view(studio: Studio, given: str) -> LookView:
    """The looks at one data set. Raises UnknownIdError."""
    place = place_of(studio, given)
    snapshot, asked = read_snapshot(place), worker.last_request(place)
    is_open = asked > (snapshot.asked if snapshot else 0)
    is_new = asked > time.time_ns() - _START_NANOSECONDS
    is_looking = worker.is_looking(place) or (is_open and is_new)
    return LookView(
        set_id=place.id,
        looked=snapshot is not None and snapshot.complete,
        is_looking=is_looking,
        failed=is_open and not is_looking,
        is_old=snapshot is None or snapshot.asked < place.folder.stat().st_mtime_ns,
        progress=read_progress(place) if is_looking else None,
    )


def dataset_view(
    studio: Studio, given: str, *, show: str = "all", search: str = "", bucket: str = "", page: int = 1
) -> DatasetView:
    """One data set by its id; `show` names a filter, `bucket` a size such as 1024x1024, `page` counts from 1.

    Raises UnknownIdError.
    """
    place = place_of(studio, given)
    snapshot, settings = read_snapshot(place), read_settings(place)
    pictures = pictures_by_id(place)
    tokens = min(TOKENS, settings.model.max_sequence_length)
    show = show if show in FILTERS else "all"
    shown = {key: one for key, one in pictures.items() if _matches(one, show, search, bucket, tokens)}
    pages = max(1, math.ceil(len(shown) / TILES))
    page = min(max(1, page), pages)
    buckets = Counter(one.bucket for one in pictures.values() if one.sha256 and not one.problems)
    strays = snapshot.strays if snapshot else ()
    return DatasetView(
        id=place.id,
        name=_title(place),
        folder=str(place.folder),
        writable=place.writable,
        settings=settings,
        families=[(family.name, family.title) for family in picture_families()],
        folders=[(identifier(studio.data, studio.data / name), name) for name in folders(studio.data)],
        look=look_view(studio, given),
        counts={
            name: sum(test(one, tokens) for one in pictures.values()) for name, (_, test) in FILTERS.items()
        },
        bars=[Bar(width=size[0], height=size[1], pictures=count) for size, count in sorted(buckets.items())],
        alone=sum(count == 1 for count in buckets.values()),
        strays=strays[:STRAYS_SHOWN],
        more_strays=max(0, len(strays) - STRAYS_SHOWN),
        in_metadata=sum(_in_metadata(one) for one in pictures.values()),
        undo=edits.last_change(place),
        show=show,
        search=search,
        bucket=bucket,
        page=page,
        pages=pages,
        found=len(shown),
        tiles=[
            _tile(place, key, shown[key], tokens)
            for key in itertools.islice(shown, (page - 1) * TILES, page * TILES)
        ],
    )


def tile_view(studio: Studio, given: str, picture: str) -> Tile:
    """One picture of the grid. Raises UnknownIdError."""
    place = place_of(studio, given)
    tokens = min(TOKENS, read_settings(place).model.max_sequence_length)
    return _tile(place, picture, picture_of(place, picture), tokens)


def picture_view(studio: Studio, given: str, picture: str) -> PictureView:
    """One picture by its id and that of its data set. Raises UnknownIdError."""
    place = place_of(studio, given)
    tile, keys = tile_view(studio, given, picture), list(pictures_by_id(place))
    index = keys.index(picture)
    return PictureView(
        set_id=place.id,
        set_name=_title(place),
        writable=place.writable,
        tile=tile,
        trained_caption=with_trigger_word(tile.caption, read_settings(place).trigger_word or None),
        before=keys[index - 1] if index else "",
        after=keys[index + 1] if index + 1 < len(keys) else "",
    )


def replace_view(studio: Studio, given: str, find: str, replace: str) -> ReplaceView:
    """Captions that a replacement would change, as they are on the disk now. Raises UnknownIdError."""
    place = place_of(studio, given)
    found = edits.replaced(place, pictures_by_id(place).values(), find, replace)
    rows = [
        Replacement(name=_within(place, name), now=now, then=then) for name, (now, then, _) in found.items()
    ]
    seen = hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()
    return ReplaceView(
        set_id=place.id,
        set_name=_title(place),
        writable=place.writable,
        find=find,
        replace=replace,
        rows=rows,
        seen=seen,
    )


def _tile(place: Place, key: str, picture: Picture, tokens: int) -> Tile:
    caption, locked = edits.Caption(text=picture.caption, etag=""), ""
    try:
        caption = edits.caption_now(place, edits.caption_file(picture))
    except DataError as error:
        locked = error.problems[0].what
    return Tile(
        id=key,
        name=_within(place, picture.name),
        picture=picture,
        caption=caption.text,
        etag=caption.etag,
        locked=locked,
        is_long=picture.is_long(tokens),
    )


def _matches(one: Picture, show: str, search: str, bucket: str, tokens: int) -> bool:
    return (
        FILTERS[show][1](one, tokens)
        and (not bucket or bucket == f"{one.bucket[0]}x{one.bucket[1]}")
        and (not search or search.casefold() in f"{one.name}\n{one.caption}".casefold())
    )


def _in_metadata(one: Picture) -> bool:
    return bool(one.caption) and not one.caption_from.lower().endswith(".txt")


def _title(place: Place) -> str:
    return place.folder.name


def _within(place: Place, name: str) -> str:
    return PurePosixPath(name).relative_to(place.name).as_posix()
