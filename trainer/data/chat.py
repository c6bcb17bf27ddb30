"""Files of conversations as records, every problem of every file found before anything is loaded.

A row is {"messages": [{"role": "user", "content": "..."}, ...]}, or ShareGPT's {"conversations": [{"from":
"human", "value": "..."}, ...]}; other keys of a row are passed over.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.captions import TextError, encodable, parse_json
from trainer.data.leftout import capped, list_left_out, nothing_left
from trainer.data.records import ChatRecord, Scan
from trainer.errors import ConfigError, DataError, Problem
from trainer.words import extras

if TYPE_CHECKING:
    from trainer.config.schema import DataSet, RunConfig

ROLES = ("system", "user", "assistant")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ROLES}}
_SHAPE = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'
# keys of a message that would change what is learned, and the values with which they change nothing
_UNREAD_KEYS: dict[str, tuple[object, ...]] = {
    "tool_calls": (None, []),
    "function_call": (None,),
    "weight": (None, 1),
}


def scan(config: RunConfig, progress: Callable[[int, int], None] | None) -> Scan:
    """Records of all conversations of all sets, in order of set and row.

    `progress(done, total)` runs once a row and may raise to stop. Raises one DataError with all problems of
    all files, and ConfigError for a .parquet file where pyarrow is not installed. With `on_bad_file: skip`
    bad rows are left out; a file that cannot be read is an error all the same.
    """
    problems: list[Problem] = []
    fatal = False
    rows: list[tuple[int, DataSet, int, object]] = []
    for index, one in enumerate(config.data.sets):
        try:
            rows += [(index, one, number, content) for number, content in _rows(one)]
        except DataError as error:
            fatal = True
            problems += error.problems
    records: list[ChatRecord] = []
    for done, (index, one, number, content) in enumerate(rows, start=1):
        where = f"{one.chat_file}:{number}"
        try:
            caption = _caption(content)
        except TextError as error:
            problems.append(Problem(what=error.what, where=where, remedy=error.remedy))
        else:
            record = ChatRecord(
                path=Path(where),
                identifier=f"{index}/{number}",
                caption=caption,
                repeats=one.repeats,
                content_sha256=hashlib.sha256(caption.encode()).hexdigest(),
            )
            records.append(record)
        if progress is not None:
            progress(done, len(rows))
    if problems and (fatal or config.data.on_bad_file == "error"):
        raise DataError(capped(problems))
    if not records:
        raise nothing_left(problems)
    return Scan(records=tuple(records), left_out=list_left_out(problems, {}))


def _rows(one: DataSet) -> list[tuple[int, object]]:
    """(number, content) of all rows of a set's file: bytes of a line, or an object of a table.

    Lines are counted from 1 with empty ones, which are passed over.
    """
    file = one.chat_file
    assert file is not None, "the configuration was checked"
    if file.suffix not in (".jsonl", ".parquet"):
        what = f"{file.name} is neither .jsonl nor .parquet"
        raise DataError(what, where=str(file), remedy="convert it to .jsonl")
    contents = _read_lines(file) if file.suffix == ".jsonl" else _read_parquet(file)
    rows = [(number, content) for number, content in enumerate(contents, start=1) if content is not None]
    if not rows:
        remedy = f"write lines like {_SHAPE}"
        raise DataError("the file holds no conversation", where=str(file), remedy=remedy)
    return rows


def _read_lines(file: Path) -> Sequence[object]:
    """The lines, None for an empty one."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError("the text is UTF-16, not UTF-8", where=str(file), remedy="save it as UTF-8")
    return [line if line.strip() else None for line in data.removeprefix(codecs.BOM_UTF8).split(b"\n")]


def _read_parquet(file: Path) -> Sequence[object]:
    """The rows as objects. Raises ConfigError where pyarrow is not installed."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        what = "reading .parquet needs pyarrow, which is not installed"
        remedy = f"{extras.remedy('parquet')}; or convert the file to .jsonl"
        raise ConfigError(what, where=str(file), remedy=remedy) from error
    try:
        table = parquet.read_table(file)
    except FileNotFoundError as error:
        raise _unreadable(file, error) from error
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these two
        what, remedy = f"cannot be read as parquet ({error})", "copy it again, or convert it to .jsonl"
        raise DataError(what, where=str(file), remedy=remedy) from error
    columns = [name for name in ("messages", "conversations") if name in table.column_names]
    return list(table.select(columns).to_pylist())


def _unreadable(file: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError("the file does not exist", where=str(file), remedy="correct `chat_file`")
    what = f"the file cannot be read: {error.strerror or error}"
    return DataError(what, where=str(file), remedy="name a file, and check its permissions")


def _caption(content: object) -> str:
    """A row's conversation as JSON text."""
    value = content
    if isinstance(content, bytes):
        try:
            line = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TextError(f"the text is not UTF-8 (byte {error.start})", "save it as UTF-8") from error
        value = parse_json(line, _SHAPE, line="one conversation a line, as ")
    if not isinstance(value, dict):
        raise TextError("the row is not a JSON object", f"write {_SHAPE}")
    caption = json.dumps(_messages(value), ensure_ascii=False, separators=(",", ":"))
    if not encodable(caption):
        what, remedy = "a content holds half of a surrogate pair", "write the character itself, or remove it"
        raise TextError(what, remedy)
    return caption


def _messages(value: dict[str, Any]) -> list[dict[str, str]]:
    """The conversation with our role names, checked; `messages` where a row has both."""
    if value.get("messages") is not None:
        found, keys, roles = value["messages"], ("role", "content"), {role: role for role in ROLES}
    elif value.get("conversations") is not None:
        found, keys, roles = value["conversations"], ("from", "value"), _SHAREGPT_ROLES
    else:
        raise TextError("the row has no `messages`", f"write {_SHAPE}")
    if not isinstance(found, list) or not found:
        raise TextError("the messages are no list, or an empty one", f"write {_SHAPE}")
    messages = [_message(number, message, keys, roles) for number, message in enumerate(found, start=1)]
    if messages[0]["role"] == "assistant":
        what = "the first message is the assistant's, and nothing is asked before it"
        raise TextError(what, "remove it, or begin with a message of the user")
    if all(message["role"] != "assistant" for message in messages):
        raise TextError("no message is the assistant's: there is nothing to learn", "add its answer")
    if messages[-1]["role"] != "assistant":
        what = f"the last message is the {messages[-1]['role']}'s, and nothing answers it"
        raise TextError(what, "add the assistant's answer, or remove the message")
    return messages


def _message(number: int, value: object, keys: tuple[str, str], roles: dict[str, str]) -> dict[str, str]:
    """One message as {"role", "content"}."""
    role_key, content_key = keys
    if not isinstance(value, dict):
        raise TextError(f"message {number} is not a JSON object", f"write {_SHAPE}")
    role, content = value.get(role_key), value.get(content_key)
    if not isinstance(role, str) or role not in roles:
        remedy = f"`{role_key}` is one of {', '.join(roles)}"
        raise TextError(f"message {number} has an unknown role: {role!r}", remedy)
    for key, harmless in _UNREAD_KEYS.items():
        if value.get(key) not in harmless:
            what = f"message {number} has `{key}`, which is not read"
            raise TextError(what, "remove the key, or the conversation; only text is learned")
    if not isinstance(content, str):
        what = f"the content of message {number} is not a text"
        raise TextError(what, f"write `{content_key}` as one text")
    if not content.strip():
        raise TextError(f"the content of message {number} is empty", "write it, or remove the conversation")
    return {"role": roles[role], "content": content}
