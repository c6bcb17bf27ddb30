"""Files of conversations as records, every problem of every file found before anything is loaded.

A file's format is found by its content (`conversations.formats`), or said by `columns` or `dataset_info`, and
told in the log.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.caption_text import TextError, encodable
from trainer.data.conversations.dataset_info import read_entry
from trainer.data.conversations.files import Row, parse, read_rows, table_columns
from trainer.data.conversations.formats import (
    Layout,
    Messages,
    as_text,
    find_layout,
    layout_of_columns,
    messages_of,
)
from trainer.data.leftout import capped, list_left_out, nothing_left
from trainer.data.records import ChatRecord, Scan
from trainer.errors import DataError, Problem
from trainer.words.plurals import numbered

if TYPE_CHECKING:
    from trainer.config.schema import DataSet, RunConfig

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _File:
    """One set's file: its rows, and what was found in those that were read."""

    index: int
    repeats: int
    path: Path
    given: bool
    """Whether the configuration says the layout; else it is found by content."""
    rows: Sequence[Row]
    layout: Layout | None = None
    """The format of the file, once a record was found to have one, or where it is given."""
    since: str = ""
    """Place of the record that has settled it."""
    seen: set[str] = field(default_factory=set)
    """Keys that any record has."""
    records: list[ChatRecord] = field(default_factory=list)


class _MixedError(TextError):
    """A record of another format than those before it."""


def scan(config: RunConfig, progress: Callable[[int, int], None] | None) -> Scan:
    """Records of all conversations of all sets, in order of set and row.

    `progress(done, total)` runs once a row and may raise to stop. Raises one DataError with all problems of
    all files, and ConfigError for a .parquet file where pyarrow is not installed. With `on_bad_file: skip`
    bad rows are left out; a file that cannot be read, or that mixes formats, is an error all the same.
    """
    problems: list[Problem] = []
    fatal = False
    files: list[_File] = []
    for index, one in enumerate(config.data.sets):
        try:
            files.append(_open(index, one, files))
        except DataError as error:
            fatal = True
            problems += error.problems
    done, total = 0, sum(len(file.rows) for file in files)
    for file in files:
        for row in file.rows:
            try:
                file.records.append(_record(file, row))
            except TextError as error:
                fatal = fatal or isinstance(error, _MixedError)
                problems.append(Problem(what=error.what, where=row[0], remedy=error.remedy))
            done += 1
            if progress is not None:
                progress(done, total)
    missing = [problem for file in files for problem in _never_there(file)]
    fatal, problems = fatal or bool(missing), [*missing, *problems]
    if problems and (fatal or config.data.on_bad_file == "error"):
        raise DataError(capped(problems))
    records = [record for file in files for record in file.records]
    if not records:
        raise nothing_left(problems)
    for file in files:
        _tell(file)
    return Scan(records=tuple(records), left_out=list_left_out(problems, {}))


def _open(index: int, one: DataSet, others: Sequence[_File]) -> _File:
    """A set's file with its rows. Raises DataError; also for a file that is one of the `others`."""
    layout = layout_of_columns(one.columns.named) if one.columns is not None else None
    if one.dataset_info is not None:
        assert one.name is not None, "the configuration was checked"
        path, layout = read_entry(one.dataset_info, one.name)
    else:
        assert one.chat_file is not None, "the configuration was checked"
        path = one.chat_file
    for other in others:
        if os.path.realpath(path) == os.path.realpath(other.path):
            remedy = "remove one of the two, and write `repeats: 2` in the other"
            if layout is not None and other.given and layout != other.layout:
                remedy = "name a copy of the file: one file has one layout"
            raise DataError("the file is a set already", where=str(path), remedy=remedy)
    rows = read_rows(path, layout)
    given = layout is not None
    return _File(index=index, repeats=one.repeats, path=path, given=given, rows=rows, layout=layout)


def _never_there(file: _File) -> list[Problem]:
    """One problem for each key that the configuration names and no record of the file has."""
    if file.layout is None or not file.given:
        return []
    names = [key for key in file.layout.keys if key not in file.seen]
    there = sorted({*file.seen, *(table_columns(file.path) if names else ())})
    remedy = f"correct the name; records have {', '.join(there) or 'no keys'}"
    return [Problem(what=f"no record has `{key}`", where=str(file.path), remedy=remedy) for key in names]


def _tell(file: _File) -> None:
    """Tell a file's format and how many conversations were taken from it."""
    if file.layout is not None:
        count, name = len(file.records), file.layout.name
        _log.info("%s: %s (%s)", file.path, numbered(count, "conversation"), name)


def _record(file: _File, row: Row) -> ChatRecord:
    """The record of a row; the first one whose format is known settles the file's."""
    place, number, content = row
    value = parse(content)
    if file.given:
        file.seen.update(value)
    layout = file.layout if file.given and file.layout is not None else find_layout(value)
    if file.layout is None:
        file.layout, file.since = layout, place
    if layout is not file.layout:
        what = f"the row is {layout.name}, and the file is {file.layout.name} since {file.since}"
        raise _MixedError(
            what, "write one format in a file: put the others into a file, and a set, of their own"
        )
    caption = _caption(messages_of(value, layout))
    return ChatRecord(
        path=Path(place),
        identifier=f"{file.index}/{number}",
        caption=caption,
        repeats=file.repeats,
        content_sha256=hashlib.sha256(caption.encode()).hexdigest(),
    )


def _caption(messages: Messages) -> str:
    """A conversation as JSON text."""
    caption = as_text(messages)
    if not encodable(caption):
        what, remedy = "a content holds half of a surrogate pair", "write the character itself, or remove it"
        raise TextError(what, remedy)
    return caption
