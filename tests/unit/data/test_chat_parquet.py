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
