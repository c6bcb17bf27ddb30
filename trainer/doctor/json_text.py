"""JSON with the line of every key. Nothing is resolved: numbers and switches stay text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from trainer.doctor.entries import MOST_DEPTH, MOST_ENTRIES, Entry

_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null|NaN|-?Infinity")
_SCAN = json.decoder.scanstring  # type: ignore[attr-defined]  # C, and takes the place to begin at


class JsonError(ValueError):
    """Text that is no JSON: `line` says where, counted from 1."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


def entries(text: str) -> list[Entry]:
    """Every key of the text in its order; raises JsonError where it is no JSON, or too deep or long."""
    reader = _Reader(text)
    found = list(reader.value((), 1))
    reader.skip()
    if reader.place < len(text):
        raise reader.error("more text behind the end of the value")
    return found


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
            raise self.error(f"nested more than {MOST_DEPTH} deep")
        self.count += 1
        if self.count > MOST_ENTRIES:
            raise self.error(f"more than {MOST_ENTRIES} keys")
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
