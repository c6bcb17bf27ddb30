"""Floor 4: captions from sidecar .txt files and metadata.jsonl."""

from __future__ import annotations

import codecs
import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import DataError, Problem

METADATA_NAME = "metadata.jsonl"
MAX_CAPTION_BYTES = 16 * 1024
_KEYS = ("file_name", "text", "control_file_name")
_LINE_SHAPE = '{"file_name": "cat.png", "text": "a cat"}'


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What metadata.jsonl says."""

    rows: Mapping[str, str] = field(default_factory=dict)
    """Captions by file name."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Where each name stands, as `folder/metadata.jsonl:3`; also of rows whose caption is bad."""
    controls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the images before the edit, of the rows that have any."""


class _RowError(Exception):
    """One line that cannot be used: what is wrong, and what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


def read_sidecar(path: Path) -> str:
    """The caption in a text file, on one line. Raises DataError when it is empty, too large or not UTF-8."""
    try:
        size = path.stat().st_size
        if size > MAX_CAPTION_BYTES:
            raise DataError(
                f"the caption has {size} bytes, more than {MAX_CAPTION_BYTES}",
                where=str(path),
                remedy="shorten it; encoders read a few hundred words at most",
            )
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"the caption cannot be read: {error.strerror or error}",
            where=str(path),
            remedy="check its permissions",
        ) from error
    try:
        return clean_caption(decode_text(data))
    except _RowError as error:
        raise DataError(error.what, where=str(path), remedy=error.remedy) from error


def read_metadata(path: Path) -> tuple[Metadata, list[Problem]]:
    """All good rows of a metadata.jsonl, and a problem with its line number for every other one."""
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        what = f"the file cannot be read: {error.strerror or error}"
        return Metadata(), [Problem(what=what, where=str(path), remedy="check its permissions")]
    rows: dict[str, str] = {}
    named: dict[str, str] = {}
    controls: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = _parse(line)
            name = _file_name(value)
            if name in named:
                first_line = named[name].rpartition(":")[2]
                raise _RowError(
                    f"{name} is named a second time, first on line {first_line}", "keep one of the lines"
                )
            named[name] = where
            rows[name] = _text(value)
            if "control_file_name" in value:
                controls[name] = _control_names(value["control_file_name"])
        except _RowError as error:
            problems.append(Problem(what=error.what, where=where, remedy=error.remedy))
    return Metadata(rows=rows, named=named, controls=controls), problems


def with_trigger_word(caption: str, trigger_word: str | None) -> str:
    """The caption with the trigger word before it, unless it has it as a word of its own already."""
    if not trigger_word or re.search(rf"(?<!\w){re.escape(trigger_word)}(?!\w)", caption):
        return caption
    return f"{trigger_word}, {caption}"


def decode_text(data: bytes) -> str:
    """UTF-8 text, with or without a byte order mark. Raises an error for any other encoding."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise _RowError("the text is UTF-16, not UTF-8", "save it as UTF-8")
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _RowError(f"the text is not UTF-8 (byte {error.start})", "save it as UTF-8") from error


def clean_caption(text: str) -> str:
    """The caption with line breaks and runs of blanks made one blank. Raises when nothing is left."""
    if "\x00" in text:
        raise _RowError("the caption holds a NUL character", "remove it; this is rarely a text file")
    caption = " ".join(text.split())
    if not caption:
        raise _RowError("the caption is empty", "describe the picture in a few words")
    if not _encodable(caption):
        raise _RowError(
            "the caption holds half of a surrogate pair", "write the character itself, or remove it"
        )
    return caption


def _parse(line: bytes) -> dict[str, Any]:
    """One line as an object whose keys are all known and there once."""
    try:
        value = json.loads(decode_text(line), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise _RowError(
            f"not valid JSON: {error.msg} (column {error.colno})", f"write {_LINE_SHAPE}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _RowError(f"not valid JSON: {error}", f"write {_LINE_SHAPE}") from error
    if not isinstance(value, dict):
        raise _RowError("the line is not a JSON object", f"write {_LINE_SHAPE}")
    for key in value:
        if key not in _KEYS:
            close = difflib.get_close_matches(key, [*_KEYS, "caption"], n=1)
            hint = {"caption": "text"}.get(close[0], close[0]) if close else ""
            guess = f"did you mean `{hint}`? " if hint else ""
            known = ", ".join(f"`{known}`" for known in _KEYS)
            raise _RowError(f"unknown key {key!r}", f"{guess}only {known} are read")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no key is repeated."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _RowError("a key is there twice", "keep one of them")
    return value


def _file_name(value: dict[str, Any]) -> str:
    """The row's `file_name`, a plain name within the folder."""
    if "file_name" not in value:
        raise _RowError("`file_name` is missing", f"write {_LINE_SHAPE}")
    return _plain_name(value["file_name"], "file_name", "beside metadata.jsonl")


def _control_names(value: object) -> tuple[str, ...]:
    """The row's `control_file_name`: one plain name, or a list of them."""
    names = value if isinstance(value, list) else [value]
    if not names:
        raise _RowError("`control_file_name` is an empty list", "name an image, or leave the key out")
    return tuple(_plain_name(name, "control_file_name", "into the control folder") for name in names)


def _plain_name(name: object, key: str, place: str) -> str:
    """A file name within its folder."""
    if not isinstance(name, str) or not name or not _encodable(name):
        raise _RowError(f"`{key}` is not a name: {name!r}", f"write {_LINE_SHAPE}")
    if "/" in name or "\\" in name or "\x00" in name or name in {".", ".."}:
        raise _RowError(
            f"`{key}` {name!r} points out of the folder or into a sub-folder",
            f"put the picture {place} and write its bare name",
        )
    return name


def _text(value: dict[str, Any]) -> str:
    """The row's caption."""
    if "text" not in value:
        raise _RowError("`text` is missing", f"write {_LINE_SHAPE}")
    text = value["text"]
    if not isinstance(text, str):
        raise _RowError(f"`text` is not a text: {text!r:.80}", f"write {_LINE_SHAPE}")
    if len(text) > MAX_CAPTION_BYTES:
        raise _RowError(
            f"the caption has {len(text)} characters, more than {MAX_CAPTION_BYTES}", "shorten it"
        )
    return clean_caption(text)


def _encodable(text: str) -> bool:
    """Whether the text can be written as UTF-8: JSON can spell halves of characters that cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
