"""Conversations: good rows become records, every bad one is told with its place and a remedy."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.config.schema import DataSection, DataSet, ModelSection, RunConfig
from trainer.data import chat
from trainer.data.leftout import MAX_PROBLEMS_SHOWN
from trainer.data.records import ChatRecord
from trainer.errors import ConfigError, DataError, ExitCode, StoppedError

EXAMPLE = Path(__file__).parents[3] / "examples" / "chat.jsonl"
ASKED, ANSWERED = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
GOOD = {"messages": [ASKED, ANSWERED]}


def write(path: Path, *rows: object) -> Path:
    """Write one row per line; a text is written unchanged."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def scan(*files: Path, progress: Callable[[int, int], None] | None = None) -> tuple[ChatRecord, ...]:
    """The first file has one repeat, the next one two."""
    config = RunConfig(
        family="any",
        model=ModelSection(pretrained_model_name_or_path="any"),
        data=DataSection(sets=[DataSet(chat_file=file, repeats=i) for i, file in enumerate(files, 1)]),
        output_dir=Path("any"),
    )
    return tuple(record for record in chat.scan(config, progress).records if isinstance(record, ChatRecord))


def problems(*files: Path) -> list[tuple[str, str, str]]:
    """(place, what, remedy) of every problem."""
    with pytest.raises(DataError) as caught:
        scan(*files)
    assert caught.value.exit_code == ExitCode.BAD_DATA
    return [(problem.where, problem.what, problem.remedy) for problem in caught.value.problems]


def test_the_example_is_sound() -> None:
    records = scan(EXAMPLE)
    chats = [json.loads(record.caption) for record in records]
    assert len({record.content_sha256 for record in records}) == len(records) == 20
    assert sum(messages[0]["role"] == "system" for messages in chats) >= 1
    assert sum(len(messages) > 3 for messages in chats) >= 4
    assert EXAMPLE.stat().st_size < 20_000


def test_records_of_two_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", GOOD, "", {"id": 7, "messages": [ASKED, ANSWERED, ASKED, ANSWERED]})
    second = write(
        tmp_path / "b.jsonl", {"messages": [{"content": "日本 \ud83d\ude80", "role": "user"}, ANSWERED]}
    )
    records = scan(first, second)
    assert [(record.identifier, record.repeats, record.controls) for record in records] == [
        ("0/1", 1, ()),
        ("0/3", 1, ()),
        ("1/1", 2, ()),
    ]
    assert records[1].path == tmp_path / "a.jsonl:3"
    caption = records[2].caption
    answer = '{"role":"assistant","content":"Hello!"}'
    assert caption == f'[{{"role":"user","content":"日本 🚀"}},{answer}]'
    assert records[2].content_sha256 == hashlib.sha256(caption.encode()).hexdigest()


def test_sharegpt_rows_give_the_same_records(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello!", "weight": None},
    ]
    ours = [{"role": "system", "content": "Be kind."}, ASKED, ANSWERED]
    other = scan(write(tmp_path / "a.jsonl", {"conversations": turns}))
    same = scan(write(tmp_path / "b.jsonl", {"messages": ours, "conversations": []}))
    assert other[0].caption == same[0].caption
    assert other[0].content_sha256 == same[0].content_sha256


def test_a_byte_order_mark_and_the_line_ends_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n")
    assert [record.identifier for record in scan(path)] == ["0/1"]


def messages(*values: object) -> dict[str, object]:
    return {"messages": list(values)}


# a row, what is told of it, words of the remedy
BAD_ROWS: dict[str, tuple[object, str, str]] = {
    "not JSON": ('{"messages": [', "not valid JSON: Expecting value (column 15)", "one conversation a line"),
    "a key twice": ('{"messages": [], "messages": []}', "the key 'messages' is there twice", "keep one"),
    "too deep": ("[" * 100_000, "not valid JSON: ", "write"),
    "not an object": ([GOOD], "not a JSON object", "write"),
    "no messages": ({"text": "Hi"}, "no `messages`", '"messages": [{'),
    "messages that are no list": ({"messages": "Hi"}, "no list", "write"),
    "empty messages": (messages(), "an empty one", "write"),
    "a message that is no object": (messages("Hi", ANSWERED), "message 1 is not a JSON object", "write"),
    "unknown role": (
        messages(ASKED, {"role": "bot", "content": "x"}),
        "message 2 has an unknown role: 'bot'",
        "user",
    ),
    "no role": (messages({"content": "x"}, ANSWERED), "message 1 has no `role`", "`role` is one of system"),
    "ShareGPT's roles": (
        messages({"role": "human", "content": "x"}, ANSWERED),
        "message 1 has an unknown role: 'human'",
        "`columns: {messages: messages}` reads ShareGPT's words",
    ),
    "ShareGPT's keys": (
        messages({"from": "human", "value": "x"}, ANSWERED),
        "message 1 has no `role`",
        "`columns: {messages: messages}` reads ShareGPT's words",
    ),
    "empty content": (
        messages(ASKED, {"role": "assistant", "content": " \n"}),
        "message 2 is empty",
        "remove",
    ),
    "content of parts": (
        messages({"role": "user", "content": [{"type": "text"}]}),
        "not a text",
        "as one text",
    ),
    "no content": (messages({"role": "user"}, ANSWERED), "message 1 is not a text", "`content`"),
    "tool call": (messages(ASKED, {**ANSWERED, "tool_calls": [{}]}), "has `tool_calls`", "only text"),
    "weight": (messages(ASKED, {**ANSWERED, "weight": 0}), "message 2 has `weight`", "remove the key"),
    "no assistant": (messages(ASKED), "nothing to learn", "add its answer"),
    "last is the user": (
        messages(ASKED, ANSWERED, ASKED),
        "the last message is the user's",
        "or remove the message",
    ),
    "first is the assistant": (
        messages(ANSWERED, ASKED, ANSWERED),
        "the first message is the assistant's",
        "begin",
    ),
    "the system, and the assistant": (
        messages({"role": "system", "content": "Be kind."}, ANSWERED),
        "the first message after the system's is the assistant's",
        "begin",
    ),
    "half a character": (messages({"role": "user", "content": "\ud800"}, ANSWERED), "surrogate", "itself"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(tmp_path: Path, name: str) -> None:
    row, what, remedy = BAD_ROWS[name]
    path = write(tmp_path / "a.jsonl", GOOD, "", row)
    ((where, told, advice),) = problems(path)
    assert where == f"{path}:3"
    assert what in told
    assert remedy in advice


def test_all_problems_of_all_files_are_told(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", "{", GOOD, messages(ASKED))
    second = write(tmp_path / "b.jsonl", messages())
    second.write_bytes(second.read_bytes() + b'{"messages": "\xff"}\n')
    found = problems(first, tmp_path / "none.jsonl", second)
    assert [where for where, _, _ in found] == [
        str(tmp_path / "none.jsonl"),
        f"{first}:1",
        f"{first}:3",
        f"{second}:1",
        f"{second}:2",
    ]
    assert found[-1][1] == "the text is not UTF-8 (byte 14)"


def test_many_problems_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *["{"] * (MAX_PROBLEMS_SHOWN + 7))
    found = problems(path)
    assert len(found) == MAX_PROBLEMS_SHOWN + 1
    assert found[-1][1] == "... and 7 more problems"


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("a.jsonl", b"\n \n", "holds no conversation"),
        ("a.jsonl", '{"messages"'.encode("utf-16"), "UTF-16"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "compressed by gzip"),
        ("a.json", b"PK\x03\x04", "zip archive"),
        ("a.jsonl", b"PAR1", "parquet table"),
        ("a.txt", b"{}", "neither .jsonl, .json nor .parquet"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, data: bytes, what: str) -> None:
    (tmp_path / name).write_bytes(data)
    ((where, told, remedy),) = problems(tmp_path / name)
    assert where == str(tmp_path / name)
    assert what in told
    assert remedy


def test_capitals_of_a_files_kind_do_not_count(tmp_path: Path) -> None:
    assert len(scan(write(tmp_path / "A.JSONL", GOOD))) == 1


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    ((_, told, remedy),) = problems(tmp_path / "a.jsonl")
    assert "cannot be read: Is a directory" in told
    assert "name a file" in remedy


def test_progress_counts_every_row_and_may_stop_the_scan(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[GOOD] * 3)
    seen: list[tuple[int, int]] = []
    scan(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]

    def stop(done: int, total: int) -> None:
        raise StoppedError("asked to stop")

    with pytest.raises(StoppedError):
        scan(path, progress=stop)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        ConfigError, match=r"needs pyarrow.*\n.*pip install -c constraints.txt -e '.\[parquet\]'"
    ):
        scan(tmp_path / "a.parquet")


def test_parquet_rows_are_read_as_lines_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow is not among the packages that tests need: this table answers as its own does."""

    def read_schema(path: Path) -> Any:
        if path.name != "a.parquet":
            raise ValueError("Parquet magic bytes not found")
        return SimpleNamespace(names=["id", "messages"])

    def read_table(path: Path, *, columns: list[str]) -> Any:
        assert columns == ["messages"]
        return SimpleNamespace(to_pylist=lambda: [GOOD, messages(ASKED), {"messages": None}])

    table = SimpleNamespace(read_schema=read_schema, read_table=read_table)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", table)
    found = problems(tmp_path / "a.parquet", tmp_path / "b.parquet")
    assert [(where, what.partition(":")[0].partition(" (")[0]) for where, what, _ in found] == [
        (str(tmp_path / "b.parquet"), "cannot be read as parquet"),
        (f"{tmp_path / 'a.parquet'}:2", "no message is the assistant's"),
        (f"{tmp_path / 'a.parquet'}:3", "the row has no `messages`, `conversations` or `instruction`"),
    ]


def test_bad_rows_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, {"messages": []}, GOOD)
    config = RunConfig(
        family="any",
        model=ModelSection(pretrained_model_name_or_path="any"),
        data=DataSection(sets=[DataSet(chat_file=path)], on_bad_file="skip"),
        output_dir=Path("any"),
    )
    found = chat.scan(config, None)
    assert [record.identifier for record in found.records] == ["0/1", "0/3"]
    assert [*found.left_out] == [(f"{path}:2", "the messages are no list, or an empty one")]
    write(path, {"messages": []})
    with pytest.raises(DataError, match="no sample is left"):
        chat.scan(config, None)
    path.unlink()
    with pytest.raises(DataError, match="does not exist"):
        chat.scan(config, None)
