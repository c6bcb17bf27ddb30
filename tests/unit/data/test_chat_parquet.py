"""Conversations in real tables, where pyarrow is installed: the extra `parquet`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.test_chat import ANSWERED, ASKED
from tests.unit.data.test_chat_columns import conversations, told
from tests.unit.data.test_chat_formats import BAD_RECORDS, GOOD_RECORDS

pa: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")


def table(path: Path, *records: object) -> Path:
    """A table of these records, as `datasets` writes it: every row has every key, with nulls."""
    parquet.write_table(pa.Table.from_pylist(list(records)), path)
    return path


@pytest.mark.parametrize("name", GOOD_RECORDS)
def test_good_records(tmp_path: Path, name: str) -> None:
    record, expected = GOOD_RECORDS[name]
    path = table(tmp_path / "a.parquet", {"id": 1, **record}, {**record, "id": 2})
    assert conversations({"chat_file": path}) == [expected, expected]


# Arrow refuses columns of several types and halves of characters itself
OF_ONE_TYPE = [
    name for name in BAD_RECORDS if "half a character" not in name and name != "a role that is a list"
]


@pytest.mark.parametrize("name", OF_ONE_TYPE)
def test_bad_records(tmp_path: Path, name: str) -> None:
    record, what, remedy = BAD_RECORDS[name]
    path = table(tmp_path / "a.parquet", record)
    first, *_ = told({"chat_file": path})
    if name.startswith("no format"):
        assert (first.where, first.what.partition(" `")[0]) == (str(path), "the table has no column")
        return
    assert first.where == f"{path}:1"
    assert what in first.what
    assert remedy in first.remedy


def test_other_names(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", {"question": "Hi", "answer": "Hello!", "vector": [0.5] * 8})
    columns = {"prompt": "question", "response": "answer"}
    assert conversations({"chat_file": path, "columns": columns}) == [[ASKED, ANSWERED]]
    (problem,) = told({"chat_file": path, "columns": {**columns, "query": "topic"}})
    assert (problem.what, problem.where) == ("no record has `topic`", str(path))


def test_only_the_columns_that_are_read_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"question": "Hi", "answer": "Hello!", "vector": [0.5] * 8}
    path = table(tmp_path / "a.parquet", record)
    loaded, load = [], parquet.read_table

    def noted(*words: object, **options: object) -> object:
        loaded.append(load(*words, **options))
        return loaded[-1]

    monkeypatch.setattr(parquet, "read_table", noted)
    columns = {"prompt": "question", "response": "answer"}
    assert conversations({"chat_file": path, "columns": columns}) == [[ASKED, ANSWERED]]
    assert {name for one in loaded for name in one.column_names} == {"question", "answer"}


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", *[GOOD_RECORDS["alpaca"][0]] * 500)
    data = path.read_bytes()
    for broken in (b"", b"PAR1", data[: len(data) // 2], data[:40] + b"\0" * 400 + data[440:], b"{}\n"):
        path.write_bytes(broken)
        (problem,) = told({"chat_file": path})
        assert problem.what.startswith("cannot be read as parquet ("), broken[:20]
        assert "convert it to .jsonl" in problem.remedy
    path.write_bytes(data)
    assert len(conversations({"chat_file": path})) == 500


def test_an_empty_table(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pa.table({"messages": pa.array([], pa.list_(pa.struct({"role": pa.string()})))}), path
    )
    (problem,) = told({"chat_file": path})
    assert problem.what == "the file holds no conversation"


TIMES = {
    "nanoseconds": pa.timestamp("ns"),
    "a year beyond 9999": pa.timestamp("us"),
    "a zone that is nowhere": pa.timestamp("us", tz="Mars/Phobos"),
    "a duration": pa.duration("s"),
}


@pytest.mark.parametrize("kind", TIMES)
@pytest.mark.parametrize("listed", [pa.list_, pa.large_list, lambda item: pa.list_(item, 2)])
def test_times_beside_the_words_are_passed_over(tmp_path: Path, kind: str, listed: Any) -> None:
    fields = [("from", pa.null()), ("role", pa.string()), ("content", pa.string())]
    plain, timed = (listed(pa.struct([*fields, ("at", one)])) for one in (pa.int64(), TIMES[kind]))
    day_ms = 24 * 3600 * 1000
    messages = [[{**ASKED, "at": day_ms * 2**35 + (kind == "nanoseconds")}, {**ANSWERED, "at": None}]]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"messages": pa.array(messages, plain).cast(timed)}), path)
    assert conversations({"chat_file": path}) == [[ASKED, ANSWERED]]


def test_a_date_is_no_question(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    days = pa.array([1, 2**31 - 1], pa.int32()).cast(pa.date32())
    parquet.write_table(pa.table({"instruction": days, "output": ["a", "b"]}), path)
    problems = told({"chat_file": path})
    assert [one.where for one in problems] == [f"{path}:1", f"{path}:2"]
    assert {one.what for one in problems} == {"`instruction` is not a text"}


def test_a_text_that_is_no_utf8_is_told_by_its_row(tmp_path: Path) -> None:
    begins, words = pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"Hi\xffi")
    asked = pa.Array.from_buffers(pa.string(), 2, [None, begins, words])
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"instruction": asked, "output": ["Hello!", "b"]}), path)
    (problem,) = told({"chat_file": path})
    assert (problem.where, problem.what) == (f"{path}:2", "the text is not UTF-8 (byte 0)")
    assert problem.remedy == "save it as UTF-8"
