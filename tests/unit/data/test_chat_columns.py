"""Conversations whose keys bear other names: maps of columns, and entries of a dataset_info.json."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.data.test_chat import ANSWERED, ASKED, write
from tests.unit.data.test_chat_formats import SYSTEM, turns
from trainer.config.schema import DataSection, DataSet, ModelSection, RunConfig
from trainer.data import chat
from trainer.errors import DataError, Problem


def conversations(*sets: dict[str, Any]) -> list[list[dict[str, str]]]:
    """Messages of all records of these sets."""
    config = RunConfig(
        family="any",
        model=ModelSection(pretrained_model_name_or_path="any"),
        data=DataSection(sets=tuple(DataSet.model_validate(one) for one in sets)),
        output_dir=Path("any"),
    )
    return [json.loads(record.caption) for record in chat.scan(config, None).records]


def told(*sets: dict[str, Any]) -> tuple[Problem, ...]:
    """Every problem of sets that cannot be used."""
    with pytest.raises(DataError) as caught:
        conversations(*sets)
    return caught.value.problems


# columns, a record, the conversation
MAPPED: dict[str, tuple[dict[str, str], dict[str, Any], list[dict[str, str]]]] = {
    "a question and an answer": (
        {"prompt": "question", "response": "answer"},
        {
            "question": "Hi",
            "answer": "Hello!",
            "system": "unread",
            "input": "unread",
            "history": [["a", "b"]],
        },
        [ASKED, ANSWERED],
    ),
    "all columns": (
        {"prompt": "q", "query": "more", "response": "a", "history": "h", "system": "s"},
        {"q": "c", "more": "d", "a": "e", "s": "s", "h": [["a", "b"]]},
        turns("a", "b", "c\nd", "e", system="s"),
    ),
    "messages": (
        {"messages": "chat"},
        {"chat": [ASKED, ANSWERED], "messages": "unread", "system": "unread"},
        [ASKED, ANSWERED],
    ),
    "messages as ShareGPT, with a system prompt": (
        {"messages": "chat", "system": "rules"},
        {"chat": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}], "rules": "Be kind."},
        [SYSTEM, ASKED, ANSWERED],
    ),
    "a system prompt in both places": (
        {"messages": "chat", "system": "rules"},
        {"chat": [SYSTEM, ASKED, ANSWERED], "rules": "Be kind."},
        [SYSTEM, ASKED, ANSWERED],
    ),
    "messages without a system prompt": (
        {"messages": "chat", "system": "rules"},
        {"chat": [ASKED, ANSWERED], "rules": ""},
        [ASKED, ANSWERED],
    ),
}


@pytest.mark.parametrize("name", MAPPED)
def test_columns_name_the_keys(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    columns, record, expected = MAPPED[name]
    path = write(tmp_path / "a.jsonl", record)
    with caplog.at_level(logging.INFO, logger="trainer"):
        assert conversations({"chat_file": path, "columns": columns}) == [expected]
    names = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
    assert caplog.messages == [f"{path}: 1 conversation ({names})"]


def test_names_that_no_record_has_are_told_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"question": "Hi", "answer": "Hello!"}] * 60)
    columns = {"prompt": "question", "query": "inptu", "response": "answer"}
    (problem,) = told({"chat_file": path, "columns": columns})
    assert (problem.where, problem.what) == (str(path), "no record has `inptu`")
    assert problem.remedy == "correct the name; records have answer, question"
    first, *_ = told({"chat_file": path, "columns": {"messages": "chat"}})
    assert first.what == "no record has `chat`"


def test_a_name_that_one_record_lacks_is_told_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"chat": [ASKED, ANSWERED]}, {"messages": [ASKED, ANSWERED]})
    (problem,) = told({"chat_file": path, "columns": {"messages": "chat"}})
    assert (problem.where, problem.what) == (f"{path}:2", "the row has no `chat`")
    assert '{"chat": [{"from": "human"' in problem.remedy


def test_two_system_prompts_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"chat": [SYSTEM, ASKED, ANSWERED], "rules": "Be brief."})
    (problem,) = told({"chat_file": path, "columns": {"messages": "chat", "system": "rules"}})
    assert problem.what == "the row has a system message, and another one as `rules`"
    assert problem.remedy == "remove one of them"


def test_columns_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_table(path: Path, *, columns: list[str]) -> Any:
        row = {"id": 1, "question": "Hi", "answer": "Hello!"}
        return SimpleNamespace(to_pylist=lambda: [{name: row[name] for name in columns}])

    def read_schema(path: Path) -> Any:
        return SimpleNamespace(names=["id", "question", "answer"])

    table = SimpleNamespace(read_table=read_table, read_schema=read_schema)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", table)
    one = {"chat_file": tmp_path / "a.parquet"}
    assert conversations({**one, "columns": {"prompt": "question", "response": "answer"}}) == [
        [ASKED, ANSWERED]
    ]
    (problem,) = told(one)
    assert problem.what.startswith("the table has no column `messages` or `conversations` or `instruction`")
    assert problem.remedy == "it has id, question, answer: name those that are meant in `columns`"
    (problem, *_) = told({**one, "columns": {"prompt": "question", "response": "reply"}})
    assert problem.what == "no record has `reply`"
    assert problem.remedy == "correct the name; records have answer, id, question"


# dataset_info.json

ALPACA_RECORD = {"instruction": "c", "input": "d", "output": "e", "system": "s", "history": [["a", "b"]]}
# an entry, a record of its file, the conversation that the format's documentation makes of it
ENTRIES: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, str]]]] = {
    "alpaca by default": ({}, ALPACA_RECORD, turns("c\nd", "e")),
    "alpaca without a query": (
        {"formatting": "alpaca", "columns": {"prompt": "instruction", "response": "output"}},
        ALPACA_RECORD,
        turns("c", "e"),
    ),
    "keys that change nothing": (
        {"ranking": False, "split": "train", "subset": None, "folder": None, "num_samples": None},
        ALPACA_RECORD,
        turns("c\nd", "e"),
    ),
    "alpaca with all columns": (
        {
            "file_sha1": "0",
            "columns": {
                "prompt": "instruction",
                "query": "input",
                "response": "output",
                "system": "system",
                "history": "history",
            },
        },
        ALPACA_RECORD,
        turns("a", "b", "c\nd", "e", system="s"),
    ),
    "sharegpt by default": (
        {"formatting": "sharegpt"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
        [ASKED, ANSWERED],
    ),
    "sharegpt with a column of system prompts": (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "conversations", "system": "system", "tools": None},
        },
        {
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}],
            "system": "Be kind.",
        },
        [SYSTEM, ASKED, ANSWERED],
    ),
    "sharegpt with the tags of OpenAI": (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "user",
                "assistant_tag": "assistant",
                "system_tag": "system",
            },
        },
        {"messages": [SYSTEM, ASKED, ANSWERED]},
        [SYSTEM, ASKED, ANSWERED],
    ),
    "sharegpt with some tags": (
        {"formatting": "sharegpt", "tags": {"user_tag": "person", "assistant_tag": "model"}},
        {"conversations": [{"from": "person", "value": "Hi"}, {"from": "model", "value": "Hello!"}]},
        [ASKED, ANSWERED],
    ),
}


def listed(folder: Path, entry: object, *records: object) -> dict[str, Any]:
    """A set of `dataset_info` with one entry, whose file has these records."""
    folder.mkdir(exist_ok=True)
    (folder / "a.json").write_text(json.dumps(records))
    info = folder / "dataset_info.json"
    info.write_text(json.dumps({"other": {"file_name": "b.json"}, "mine": entry}))
    return {"dataset_info": info, "name": "mine"}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries(tmp_path: Path, name: str) -> None:
    entry, record, expected = ENTRIES[name]
    one = listed(tmp_path / "data", {"file_name": "a.json", **entry}, record)
    assert conversations(one) == [expected]


# an entry, what is told of it, words of the remedy
BAD_ENTRIES: dict[str, tuple[object, str, str]] = {
    "hub": ({"hf_hub_url": "a/b"}, "`hf_hub_url: a/b` is not beside the file", "download it"),
    "hub beside a file": ({"file_name": "a.json", "ms_hub_url": "a/b"}, "`ms_hub_url: a/b`", "file_name"),
    "script": ({"script_url": "belle"}, "`script_url: belle`", "download it as .json"),
    "cloud": ({"cloud_file_name": "s3://b/a.json"}, "`cloud_file_name: s3://b/a.json`", "download it"),
    "no file": ({}, "`file_name` is missing", "beside dataset_info.json"),
    "gone": ({"file_name": "c.json"}, "`file_name: c.json` does not exist", "correct"),
    "folder": ({"file_name": "."}, "`file_name: .` is a folder", "each of its files"),
    "above": (
        {"file_name": "../a.json"},
        "`file_name: ../a.json` leads out of the folder",
        "into that folder",
    ),
    "absolute": ({"file_name": "/etc/passwd"}, "leads out of the folder", "into that folder"),
    "link": (
        {"file_name": "link.json"},
        "`file_name: link.json` leads out of the folder",
        "into that folder",
    ),
    "no text": ({"file_name": 7}, "`file_name` is missing", "add the name"),
    "NUL": ({"file_name": "a\0.json"}, "leads out of the folder", "into that folder"),
    "no object": ("a.json", "the entry is not a JSON object", '{"file_name"'),
    "openai": ({"file_name": "a.json", "formatting": "openai"}, "formatting 'openai' is not read", "`tags`"),
    "a list of formats": (
        {"file_name": "a.json", "formatting": ["sharegpt"]},
        "formatting ['sharegpt'] is not read",
        "write alpaca, or sharegpt",
    ),
    "ranking": ({"file_name": "a.json", "ranking": True}, "`ranking` is not read", "remove it"),
    "samples": ({"file_name": "a.json", "num_samples": 10}, "`num_samples` is not read", "make a file"),
    "typo": ({"file_name": "a.json", "colums": {}}, "unknown key `colums`", "did you mean `columns`?"),
    "columns": ({"file_name": "a.json", "columns": ["x"]}, "`columns` is not a JSON object", "prompt"),
    "images": (
        {"file_name": "a.json", "columns": {"prompt": "p", "response": "r", "images": "i"}},
        "`columns.images` is not read",
        "prompt, query, response, history, system are; only text is learned",
    ),
    "messages of alpaca": (
        {"file_name": "a.json", "columns": {"messages": "m"}},
        "`columns.messages` is not read",
        "prompt, query",
    ),
    "no response": (
        {"file_name": "a.json", "columns": {"prompt": "p"}},
        "`columns` lacks a name: prompt and response are needed",
        "add it",
    ),
    "a number for a name": (
        {"file_name": "a.json", "columns": {"prompt": 1, "response": "r"}},
        "`columns.prompt` is not a name",
        "as a text",
    ),
    "tags of alpaca": (
        {"file_name": "a.json", "tags": {"user_tag": "x"}},
        "which alpaca has none of",
        "remove",
    ),
    "unknown tag": (
        {"file_name": "a.json", "formatting": "sharegpt", "tags": {"usr_tag": "x"}},
        "`tags.usr_tag` is not read",
        "did you mean `user_tag`?",
    ),
    "one word for two roles": (
        {"file_name": "a.json", "formatting": "sharegpt", "tags": {"user_tag": "gpt"}},
        "`tags` give one word to two roles",
        "for each",
    ),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_bad_entries(tmp_path: Path, name: str) -> None:
    entry, what, remedy = BAD_ENTRIES[name]
    (tmp_path / "a.json").write_text("[]")
    one = listed(tmp_path / "data", entry)
    (tmp_path / "data" / "link.json").symlink_to(tmp_path / "a.json")
    (problem,) = told(one)
    assert problem.where == f"{one['dataset_info']}: mine"
    assert what in problem.what
    assert remedy in problem.remedy


def test_a_column_that_is_known_elsewhere_is_no_misspelt_one(tmp_path: Path) -> None:
    columns = {"messages": "m", "images": "i"}
    one = listed(tmp_path, {"file_name": "a.json", "formatting": "sharegpt", "columns": columns})
    assert told(one)[0].remedy == "messages, system are; only text is learned"


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        (None, "cannot be read: No such file", "correct `dataset_info`"),
        ("{", "not valid JSON: ", "correct it"),
        ("[]", "not a JSON object of data sets", '{"my_set"'),
        ('{"mind": {}}', "there is no data set 'mine'", "did you mean `mind`?"),
        ("{}", "there is no data set 'mine'", "it has none"),
        ('{"mine": {}, "mine": {}}', "the key 'mine' is there twice", "keep one"),
    ],
)
def test_bad_lists(tmp_path: Path, text: str | None, what: str, remedy: str) -> None:
    info = tmp_path / "dataset_info.json"
    if text is not None:
        info.write_text(text)
    (problem,) = told({"dataset_info": info, "name": "mine"})
    assert problem.where == str(info)
    assert what in problem.what
    assert remedy in problem.remedy


def test_a_role_of_tools_is_told_with_its_place(tmp_path: Path) -> None:
    texts = [{"from": "human", "value": "a"}, {"from": "observation", "value": "b"}]
    entry = {"file_name": "a.json", "formatting": "sharegpt"}
    (problem,) = told(listed(tmp_path / "data", entry, {"conversations": texts}))
    assert problem.where == f"{tmp_path / 'data' / 'a.json'}[0]"
    assert problem.what == "message 2 has an unknown role: 'observation'"


def test_a_file_that_is_a_set_already(tmp_path: Path) -> None:
    one = listed(tmp_path / "data", {"file_name": "a.json"}, ALPACA_RECORD)
    (problem,) = told(one, {"chat_file": tmp_path / "data" / "a.json"})
    assert problem.what == "the file is a set already"
    assert "repeats: 2" in problem.remedy


def test_a_file_with_other_columns_is_no_second_set_but_a_copy_of_it_is(tmp_path: Path) -> None:
    """A translation is learned both ways."""
    file = write(tmp_path / "a.jsonl", {"en": "a pear", "fr": "une poire"})
    there = {"chat_file": file, "columns": {"prompt": "en", "response": "fr"}}
    back = {"chat_file": file, "columns": {"prompt": "fr", "response": "en"}}
    (problem,) = told(there, back)
    assert problem.what == "the file is a set already" and "a copy of the file" in problem.remedy
    copy = shutil.copy(file, tmp_path / "b.jsonl")
    first, second = conversations(there, back | {"chat_file": copy})
    assert [one["content"] for one in (*first, *second)] == ["a pear", "une poire", "une poire", "a pear"]
