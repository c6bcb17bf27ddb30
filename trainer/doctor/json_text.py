"""JSON with the line of every key. Nothing is resolved: numbers and switches stay text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import replace

from trainer.doctor.entries import MOST_DEPTH, MOST_ENTRIES, Entry, with_repeats

_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null|NaN|-?Infinity")
_SCAN = json.decoder.scanstring  # type: ignore[attr-defined]  # C, and takes the place to begin at


class JsonError(ValueError):
    """Text that is no JSON: `line` says where, counted from 1."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


class TooLargeError(JsonError):
    """More keys, or deeper ones, than a configuration has: the text may be right."""


def entries(text: str) -> list[Entry]:
    """Every key of the text in its order; raises JsonError where it is no JSON, or too deep or long."""
    reader = _Reader(text)
    found = list(reader.value((), 1))
    reader.skip()
    if reader.place < len(text):
        raise reader.error("more text behind the end of the value")
    return found


def records(text: str, marks: Collection[str], *, whole: bool = True) -> list[Entry]:
    """Keys of a data file's records, JSON lines or an array: `record.KEY` once for all, with the line of the
    first that has it, and once more where a record has it twice; `form` is `lines` or `array`.

    Positions in lists are left out. Empty for what does not begin with an object that has one of the `marks`.
    Raises JsonError, but for a text that is not the `whole` file: its first records are enough.
    """
    reader = _Reader(text)
    is_array = reader.skip() == "["
    reader.place += is_array
    found: dict[tuple[tuple[str, ...], bool], Entry] = {}
    while (begins := reader.skip()) not in ("", "]"):
        reader.count, line = 0, reader.line
        try:
            if begins != "{":
                raise reader.error("a record that is no object")
            record = list(reader.value(("record",), line))
            if is_array and reader.skip() not in (",", "]"):
                raise reader.error('expected "," or "]" here')
        except JsonError:
            if found and whole:
                raise
            break
        if not found and not any(len(entry.path) == 2 and entry.name in marks for entry in record):
            return []
        reader.place += is_array and reader.skip() == ","
        for entry in with_repeats(record):
            path = tuple(part for part in entry.path if not part.isdecimal())
            if entry.section or entry.value:
                found.setdefault((path, entry.first_line > 0), replace(entry, path=path))
    form = Entry(path=("form",), value="array" if is_array else "lines")
    return [*found.values(), form] if found else []


class _Reader:
    """A place in the text, and the line that it is in."""

    def __init__(self, text: str) -> None:
        self.text, self.place, self.line, self.count = text, 0, 1, 0

    def error(self, what: str) -> JsonError:
        return JsonError(what, self.line)

    def skip(self) -> str:
        """The next character behind blanks; empty at the end."""
        found = _SPACE.match(self.text, self.place)
        assert found is not None
        self.line += found[0].count("\n")
        self.place = found.end()
        return self.text[self.place : self.place + 1]

    def string(self) -> str:
        begin = self.place
        try:
            value, self.place = _SCAN(self.text, begin + 1, False)
        except json.JSONDecodeError as error:
            raise self.error("a text that does not end, or holds a wrong escape") from error
        self.line += self.text.count("\n", begin, self.place)
        return str(value)

    def value(self, path: tuple[str, ...], line: int) -> Iterator[Entry]:
        """Entries of the value at the place; `line` is its key's."""
        if len(path) > MOST_DEPTH:
            raise TooLargeError(f"nested more than {MOST_DEPTH} deep", self.line)
        self.count += 1
        if self.count > MOST_ENTRIES:
            raise TooLargeError(f"more than {MOST_ENTRIES} keys", self.line)
        first = self.skip()
        if first in ("{", "["):
            if path:
                yield Entry(path=path, value="", line=line, section=True)
            self.place += 1
            yield from self.items(path, is_mapping=first == "{")
        elif first == '"':
            yield Entry(path=path, value=self.string(), line=line)
        else:
            word = _WORD.match(self.text, self.place)
            if word is None:
                what = "comments are no JSON" if first in ("/", "#") else "no value"
                raise self.error(f"{what}: {self.text[self.place : self.place + 20]!r}")
            self.place = word.end()
            yield Entry(path=path, value="" if word[0] == "null" else word[0], line=line)

    def items(self, path: tuple[str, ...], *, is_mapping: bool) -> Iterator[Entry]:
        """Entries of what stands in brackets, to the closing one."""
        close, position = "}" if is_mapping else "]", 0
        if self.skip() == close:
            self.place += 1
            return
        while True:
            key = str(position)
            begins = self.skip()
            line = self.line
            if is_mapping:
                if begins != '"':
                    found = "a comment" if begins in ("/", "#") else f"{begins!r}" if begins else "the end"
                    raise self.error(f'expected a key in quotes (") here, not {found}')
                key = self.string()
                if self.skip() != ":":
                    raise self.error(f'no ":" behind the key {key[:40]!r}')
                self.place += 1
            yield from self.value((*path, key), line)
            position += 1
            after = self.skip()
            self.place += 1
            if after == close:
                return
            if after != ",":
                raise self.error(f'expected "," or "{close}" here')
