"""Files of conversations as records, every problem of every file found before anything is loaded.

A file's format is found by its content (`conversations.formats`) and told in the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.captions import TextError, encodable
from trainer.data.conversations.files import Row, parse, read_rows
from trainer.data.conversations.formats import Layout, Messages, find_layout, messages_of
from trainer.data.leftout import capped, list_left_out, nothing_left
from trainer.data.records import ChatRecord, Scan
from trainer.errors import DataError, Problem

if TYPE_CHECKING:
    from trainer.config.schema import DataSet, RunConfig

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _File:
    """One set's file: its rows, and what was found in those that were read."""

    index: int
    data_set: DataSet
    rows: Sequence[Row]
    layout: Layout | None = None
    """The format of the file, once a record was found to have one."""
    since: str = ""
    """Place of that record."""
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
        assert one.chat_file is not None, "the configuration was checked"
        try:
            files.append(_File(index=index, data_set=one, rows=read_rows(one.chat_file)))
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
    if problems and (fatal or config.data.on_bad_file == "error"):
        raise DataError(capped(problems))
    records = [record for file in files for record in file.records]
    if not records:
        raise nothing_left(problems)
    for file in files:
        _tell(file)
    return Scan(records=tuple(records), left_out=list_left_out(problems, {}))


def _tell(file: _File) -> None:
    """Tell a file's format and how many conversations were taken from it."""
    if file.layout is not None:
        count, name = len(file.records), file.layout.name
        _log.info("%s: %d conversation%s (%s)", file.data_set.chat_file, count, "s" * (count != 1), name)


def _record(file: _File, row: Row) -> ChatRecord:
    """The record of a row; the first one whose format is known settles the file's."""
    place, number, content = row
    value = parse(content)
    layout = find_layout(value)
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
        repeats=file.data_set.repeats,
        content_sha256=hashlib.sha256(caption.encode()).hexdigest(),
    )


def _caption(messages: Messages) -> str:
    """A conversation as JSON text."""
    caption = json.dumps(messages, ensure_ascii=False, separators=(",", ":"))
    if not encodable(caption):
        what, remedy = "a content holds half of a surrogate pair", "write the character itself, or remove it"
        raise TextError(what, remedy)
    return caption
