"""One caption: from its bytes to one line of text, and what may be put before it."""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from trainer.errors import DataError

MAX_CAPTION_BYTES = 16 * 1024


class TextError(Exception):
    """A caption, a row of metadata or a conversation that cannot be used: its fault, and what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


def read_sidecar(path: Path) -> str:
    """The caption in a text file, on one line. Raises DataError when it is empty, too large or not UTF-8."""
    try:
        size = path.stat().st_size
        if size > MAX_CAPTION_BYTES:
            what = f"the caption has {size} bytes, more than {MAX_CAPTION_BYTES}"
            raise TextError(what, "shorten it; encoders read a few hundred words at most")
        return clean_caption(decode_text(path.read_bytes()))
    except OSError as error:
        what = f"the caption cannot be read: {error.strerror or error}"
        raise DataError(what, where=str(path), remedy="check its permissions") from error
    except TextError as error:
        raise DataError(error.what, where=str(path), remedy=error.remedy) from error


def with_trigger_word(caption: str, trigger_word: str | None) -> str:
    """The caption with the trigger word before it, unless it has it as a word of its own already."""
    if not trigger_word or re.search(rf"(?<!\w){re.escape(trigger_word)}(?!\w)", caption):
        return caption
    return f"{trigger_word}, {caption}"


def decode_text(data: bytes) -> str:
    """UTF-8 text, with or without a byte order mark. Raises an error for any other encoding."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TextError("the text is UTF-16, not UTF-8", "save it as UTF-8")
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"the text is not UTF-8 (byte {error.start})", "save it as UTF-8") from error


def clean_caption(text: str) -> str:
    """The caption with line breaks and runs of blanks made one blank. Raises when nothing is left."""
    if "\x00" in text:
        raise TextError("the caption holds a NUL character", "remove it; this is rarely a text file")
    caption = " ".join(text.split())
    if not caption:
        raise TextError("the caption is empty", "describe the picture in a few words")
    if not encodable(caption):
        raise TextError(
            "the caption holds half of a surrogate pair", "write the character itself, or remove it"
        )
    return caption


def object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of its keys and values, as `json.loads` hands them on. Raises TextError for a key that is
    there twice.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise TextError(f"the key {key!r:.80} is there twice", "keep one of them")
    return value


def parse_json(text: str, shape: str, *, line: str = "") -> object:
    """The value in a line of JSON, which is to be of this `shape`: `line` says what one holds.

    Raises TextError for anything else, and for an object with a key that is there twice.
    """
    try:
        return json.loads(text, object_pairs_hook=object_of_pairs)
    except json.JSONDecodeError as error:
        what = f"not valid JSON: {error.msg} (column {error.colno})"
        raise TextError(what, f"write {line}{shape}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
        raise TextError(f"not valid JSON: {error}", f"write {shape}") from error


def encodable(text: str) -> bool:
    """True if the text can be written as UTF-8: JSON can spell surrogate halves, which cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
