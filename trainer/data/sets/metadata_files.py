"""Captions of a whole folder, from its metadata.jsonl or metadata.csv.

Both are read as `datasets`' ImageFolder reads them: `file_name` is relative to the file's folder.
"""

from __future__ import annotations

import codecs
import csv
import io
import posixpath
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.data.caption_text import (
    MAX_CAPTION_BYTES,
    TextError,
    clean_caption,
    decode_text,
    encodable,
    parse_json,
)
from trainer.errors import Problem
from trainer.words.near import closest

METADATA_NAME = "metadata.jsonl"
CSV_NAME = "metadata.csv"
METADATA_NAMES = (METADATA_NAME, CSV_NAME)
_KEYS = ("file_name", "text", "control_file_name")
_SHAPES = {METADATA_NAME: '{"file_name": "cat.png", "text": "a cat"}', CSV_NAME: 'cat.png,"a cat"'}

Row = tuple[int, dict[str, Any] | TextError]
"""Number of the line on which a row begins, and its values or what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Captions and names that the metadata of a set gives; names are relative to the set, and of one form."""

    rows: Mapping[str, str]
    """Captions by file name."""
    named: Mapping[str, str]
    """Place of each name, such as `folder/metadata.jsonl:3`; also of rows whose caption is bad."""
    again: Mapping[str, str]
    """Names by the places where they stand a second time."""
    controls: Mapping[str, tuple[str, ...]]
    """Names of the images before the edit, of the rows that have any."""


def one_form(name: str) -> str:
    """A file's name with one encoding of its accents: a Mac's archives spell `é` in two characters (NFD)."""
    return unicodedata.normalize("NFC", name)


def read_metadata(paths: Sequence[Path], folder: Path) -> tuple[Metadata, list[Problem]]:
    """All good rows of a set's files, and a problem with its line number for every other one."""
    rows: dict[str, str] = {}
    named: dict[str, str] = {}
    again: dict[str, str] = {}
    controls: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    for path in paths:
        within = path.parent.relative_to(folder).as_posix()
        try:
            data = path.read_bytes()
        except OSError as error:
            what = f"the file cannot be read: {error.strerror or error}"
            problems.append(Problem(what=what, where=str(path), remedy="check its permissions"))
            continue
        for number, row in _json_rows(data) if path.name == METADATA_NAME else _csv_rows(data):
            where = f"{path}:{number}"
            try:
                if isinstance(row, TextError):
                    raise row
                if "file_name" not in row:
                    raise TextError("`file_name` is missing", f"write {_SHAPES[path.name]}")
                name = _name_within(row["file_name"], "file_name", path, within)
                if name in named:
                    first = named[name].removeprefix(f"{path}:")
                    again[where] = name
                    what = f"{name} is named a second time, first on line {first}"
                    raise TextError(what, "keep one of the lines")
                named[name] = where
                rows[name] = _text(row, path.name)
                # a null is no name, as a blank cell of a table is none
                if (before := row.get("control_file_name")) is not None:
                    if before == []:
                        what = "`control_file_name` is an empty list"
                        raise TextError(what, "name an image, or leave the key out")
                    controls[name] = tuple(
                        _name_within(one, "control_file_name", path, within)
                        for one in (before if isinstance(before, list) else [before])
                    )
            except TextError as error:
                problems.append(Problem(what=error.what, where=where, remedy=error.remedy))
    return Metadata(rows=rows, named=named, again=again, controls=controls), problems


def _json_rows(data: bytes) -> Iterator[Row]:
    """A row a line: an object in which every key is there once."""
    shape = _SHAPES[METADATA_NAME]
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            try:
                value = parse_json(decode_text(line), shape)
                if not isinstance(value, dict):
                    raise TextError("the line is not a JSON object", f"write {shape}")
                yield number, _known_keys(value)
            except TextError as error:
                yield number, error


def _csv_rows(data: bytes) -> Iterator[Row]:
    """Rows of a table whose first line names its columns."""
    try:
        text = decode_text(data)
    except TextError as error:
        bad = error.__cause__.start if isinstance(error.__cause__, UnicodeDecodeError) else 0
        yield data.removeprefix(codecs.BOM_UTF8)[:bad].count(b"\n") + 1, error
        return
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    # numbers of the lines on which rows begin: a text may have line breaks within quotes
    number = following = 1
    try:
        for cells in reader:
            number, following = following, reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = _header(cells)
            elif len(cells) != len(header):
                what = f"the row has {len(cells)} cells, the header {len(header)}"
                yield number, TextError(what, "write texts with commas in double quotes")
            else:
                pairs = zip(header, cells, strict=True)
                yield number, {key: cell for key, cell in pairs if cell.strip() or key != "control_file_name"}
    except csv.Error as error:
        yield following, TextError(f"not valid CSV: {error}", f"write {_SHAPES[CSV_NAME]}")
    except TextError as error:
        yield number, error
    else:
        if header is None:
            yield 1, TextError("the file is empty", "begin with the line file_name,text")


def _header(cells: list[str]) -> list[str]:
    """Names of the columns."""
    names = [cell.strip() for cell in cells]
    if len(names) == 1 and (";" in names[0] or "\t" in names[0]):
        raise TextError("the columns are not separated by commas", "begin with the line file_name,text")
    if len(set(names)) != len(names):
        raise TextError("a column is there twice", "keep one of them")
    _known_keys(dict.fromkeys(names))
    for key in ("file_name", "text"):
        if key not in names:
            raise TextError(f"the column `{key}` is missing", "begin with the line file_name,text")
    return names


def _known_keys(value: dict[str, Any]) -> dict[str, Any]:
    """The row, none of whose keys would be passed over."""
    for key in value:
        if key not in _KEYS:
            near = closest(key, (*_KEYS, "caption")) or ""
            hint = {"caption": "text"}.get(near, near)
            guess = f"did you mean `{hint}`? " if hint else ""
            known = ", ".join(f"`{known}`" for known in _KEYS)
            raise TextError(f"unknown key {key!r}", f"{guess}only {known} are read")
    return value


def _name_within(name: object, key: str, file: Path, folder: str) -> str:
    """A file's path within the set, in its plainest form; `folder` is that of the metadata `file`."""
    if not isinstance(name, str) or not name.strip() or not encodable(name):
        raise TextError(f"`{key}` is not a name: {name!r:.80}", f"write {_SHAPES[file.name]}")
    plain = PurePosixPath(posixpath.normpath(name))
    if plain.is_absolute() or ".." in plain.parts or not plain.parts or "\\" in name or "\x00" in name:
        place = f"beside {file.name}" if key == "file_name" else "into the control folder"
        what = f"`{key}` {name!r:.200} points out of the folder"
        raise TextError(what, f"put the picture {place}, or into a folder there, and write its path with /")
    return one_form(posixpath.normpath(posixpath.join(folder, str(plain))))


def _text(value: dict[str, Any], file: str) -> str:
    """The row's caption."""
    if "text" not in value:
        raise TextError("`text` is missing", f"write {_SHAPES[file]}")
    text = value["text"]
    if not isinstance(text, str):
        raise TextError(f"`text` is not a text: {text!r:.80}", f"write {_SHAPES[file]}")
    if len(text) > MAX_CAPTION_BYTES:
        what = f"the caption has {len(text)} characters, more than {MAX_CAPTION_BYTES}"
        raise TextError(what, "shorten it")
    return clean_caption(text)
