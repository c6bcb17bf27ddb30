"""Files of conversations as records: JSON lines, an array in a .json file, or a parquet table."""

from __future__ import annotations

import codecs
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data.caption_text import TextError, object_of_pairs, parse_json
from trainer.data.conversations.formats import FEEDBACK, LAYOUTS, OPENAI, Layout
from trainer.data.conversations.tables import table_rows
from trainer.errors import ConfigError, DataError
from trainer.words import extras

Row = tuple[str, int, object]
"""Place for people, number in the file, and content: bytes of a line, or a value that was read already."""
_BLANKS = re.compile(r"[ \t\r\n]*")
_ARRAY = f"[{OPENAI.shape}, ...]"
_NO_TEXT = (
    (b"\x1f\x8b", "the file is compressed by gzip", "decompress it: gunzip"),
    (b"PK\x03\x04", "the file is a zip archive", "unpack it: unzip"),
    (b"PAR1", "the file is a parquet table", "name it .parquet"),
)
"""First bytes of files that are no text under a text's name, what they are, and what to do."""


def read_rows(file: Path, layout: Layout | None = None) -> list[Row]:
    """All records of a file but empty lines, which are counted; of a table the columns of `layout`, or of all
    formats.

    Lines and rows of tables count from 1 (`a.jsonl:3`), items of an array from 0 (`a.json[2]`). Raises
    DataError for a file that is not read as a whole, and ConfigError for a .parquet file without pyarrow.
    """
    kind = file.suffix.lower()
    if kind not in (".parquet", *_READERS):
        what = f"{file.name} is neither .jsonl, .json nor .parquet"
        raise DataError(what, where=str(file), remedy="convert it to .jsonl")
    if kind == ".parquet":
        return _nonempty(file, _read_parquet(file, layout))
    return _nonempty(file, _READERS[kind](file))


def table_columns(file: Path) -> Sequence[str]:
    """Names of all columns of a table that was read; none of another file."""
    if file.suffix.lower() != ".parquet":
        return ()
    parquet: Any = importlib.import_module("pyarrow.parquet")
    names: Sequence[str] = parquet.read_schema(file).names
    return names


def _nonempty(file: Path, rows: Sequence[Row]) -> list[Row]:
    rows = [row for row in rows if row[2] is not None]
    if not rows:
        remedy = f"write lines like {OPENAI.shape}"
        raise DataError("the file holds no conversation", where=str(file), remedy=remedy)
    return rows


def parse(content: object) -> Mapping[str, Any]:
    """A row's record. Raises TextError for a line that is no JSON, and for what is no object."""
    value = content
    if isinstance(content, bytes):
        try:
            line = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TextError(f"the text is not UTF-8 (byte {error.start})", "save it as UTF-8") from error
        value = parse_json(line, OPENAI.shape, line="one conversation a line, as ")
    if not isinstance(value, dict):
        raise TextError("the row is not a JSON object", f"write {OPENAI.shape}")
    return value


def _read_lines(file: Path) -> list[Row]:
    """The lines, None for an empty one."""
    data = _bytes(file)
    if data.lstrip().startswith(b"["):
        remedy = f"name it .json, or write one conversation a line: {OPENAI.shape}"
        raise DataError("the file begins as a JSON array does", where=str(file), remedy=remedy)
    return _lines(file, data)


def _lines(file: Path, data: bytes) -> list[Row]:
    lines = enumerate(data.split(b"\n"), start=1)
    return [(f"{file}:{number}", number, line if line.strip() else None) for number, line in lines]


def _read_json(file: Path) -> list[Row]:
    """The items of an array; JSON lines where the content is those."""
    data = _bytes(file)
    if not data.strip():
        return []
    if not data.lstrip().startswith(b"["):
        try:
            parse(data.lstrip().partition(b"\n")[0])
        except TextError as error:
            what = f"neither a JSON array nor JSON lines: the first line is no object ({error.what})"
            remedy = f"write {_ARRAY}, or one conversation a line"
            raise DataError(what, where=str(file), remedy=remedy) from error
        return _lines(file, data)
    try:
        items = _items(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line, begins = data.count(b"\n", 0, error.start) + 1, data.rfind(b"\n", 0, error.start) + 1
        what = f"the text is not UTF-8 (byte {error.start - begins})"
        raise DataError(what, where=f"{file}:{line}", remedy="save it as UTF-8") from error
    except json.JSONDecodeError as error:
        what = f"not valid JSON: {error.msg} (column {error.colno})"
        raise DataError(what, where=f"{file}:{error.lineno}", remedy=f"write {_ARRAY}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
        raise DataError(f"not valid JSON: {error}", where=str(file), remedy=f"write {_ARRAY}") from error
    # a null is no empty line: it is told as what is no object
    return [(f"{file}[{index}]", index, [] if item is None else item) for index, item in enumerate(items)]


def _items(text: str) -> list[object]:
    """The items of a JSON array; of one with a key that is there twice its bytes, which `parse` refuses.

    Raises ValueError and RecursionError for a text that is no JSON.
    """
    try:
        items: list[object] = json.loads(text, object_pairs_hook=object_of_pairs)
    except TextError:
        json.loads(text)  # for its errors: what follows takes the text to be an array
        return _items_apart(text)
    return items


def _items_apart(text: str) -> list[object]:
    """`_items`, read one after another."""
    strict, plain = json.JSONDecoder(object_pairs_hook=object_of_pairs), json.JSONDecoder()
    items, place = list[object](), _behind_blanks(text, text.index("[") + 1)
    while text[place] != "]":
        value, end = plain.raw_decode(text, place)
        try:
            value, _ = strict.raw_decode(text, place)
        except TextError:
            value = text[place:end].encode()
        items.append(value)
        place = _behind_blanks(text, end)
        if text[place] == ",":
            place = _behind_blanks(text, place + 1)
    return items


def _behind_blanks(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    assert found is not None
    return found.end()


def _read_parquet(file: Path, layout: Layout | None) -> list[Row]:
    """The rows as objects of what the layout reads, or all formats. Raises ConfigError where pyarrow is not
    installed.
    """
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        what = "reading .parquet needs pyarrow, which is not installed"
        remedy = f"{extras.remedy('parquet')}; or convert the file to .jsonl"
        raise ConfigError(what, where=str(file), remedy=remedy) from error
    read = dict.fromkeys(key for one in (LAYOUTS if layout is None else (layout,)) for key in one.keys)
    try:
        there: Sequence[str] = parquet.read_schema(file).names
        columns = [name for name in read if name in there]
        columns += [name for name in FEEDBACK if columns and layout is None and name in there]
        # the other columns may be vectors or pictures, of many times the size
        listed = table_rows(parquet.read_table(file, columns=columns)) if columns else []
    except FileNotFoundError as error:
        raise _unreadable(file, error) from error
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own errors are kinds of these
        what, remedy = f"cannot be read as parquet ({error})", "copy it again, or convert it to .jsonl"
        raise DataError(what, where=str(file), remedy=remedy) from error
    if not columns:
        what = f"the table has no column {' or '.join(f'`{name}`' for name in read)}"
        remedy = f"it has {', '.join(there)}: name those that are meant in `columns`"
        raise DataError(what, where=str(file), remedy=remedy)
    return [(f"{file}:{number}", number, row) for number, row in enumerate(listed, start=1)]


def _bytes(file: Path) -> bytes:
    """The file's bytes without the mark of their order."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError("the text is UTF-16, not UTF-8", where=str(file), remedy="save it as UTF-8")
    for begins, what, remedy in _NO_TEXT:
        if data.startswith(begins):
            raise DataError(what, where=str(file), remedy=remedy)
    return data.removeprefix(codecs.BOM_UTF8)


def _unreadable(file: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError("the file does not exist", where=str(file), remedy="correct `chat_file`")
    what = f"the file cannot be read: {error.strerror or error}"
    return DataError(what, where=str(file), remedy="name a file, and check its permissions")


_READERS: Mapping[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_lines,
    ".json": _read_json,
}
