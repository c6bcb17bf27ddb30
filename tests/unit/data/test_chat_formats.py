"""Formats of conversations: good files of each give the messages that their formats' makers document, bad
ones are told with place and remedy.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.data.test_chat import ANSWERED, ASKED, GOOD, problems, scan, write
from trainer.config.schema import DataSection, DataSet, ModelSection, RunConfig
from trainer.data import chat
from trainer.errors import DataError

SYSTEM = {"role": "system", "content": "Be kind."}


def turns(*texts: str, system: str = "") -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn."""
    roles = ("user", "assistant") * len(texts)
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


# a record, and the conversation that the format's documentation makes of it
GOOD_RECORDS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "messages": ({"messages": [SYSTEM, ASKED, ANSWERED]}, [SYSTEM, ASKED, ANSWERED]),
    "sharegpt": (
        {
            "conversations": [
                {"from": "system", "value": "Be kind."},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello!"},
            ]
        },
        [SYSTEM, ASKED, ANSWERED],
    ),
    "sharegpt with role and content": (
        {"conversations": [SYSTEM, ASKED, ANSWERED]},
        [SYSTEM, ASKED, ANSWERED],
    ),
    "sharegpt with human and gpt as roles": (
        {"conversations": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Hello!"}]},
        [ASKED, ANSWERED],
    ),
    "sharegpt with user and assistant below from": (
        {"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello!"}]},
        [ASKED, ANSWERED],
    ),
    "sharegpt of a table": (
        {
            "conversations": [
                {"from": None, "value": None, "role": "user", "content": "Hi"},
                {"from": None, "value": None, "role": "assistant", "content": "Hello!"},
            ]
        },
        [ASKED, ANSWERED],
    ),
    "messages before alpaca": ({**GOOD, "instruction": "x", "output": "y"}, [ASKED, ANSWERED]),
    "alpaca": ({"instruction": "Hi", "output": "Hello!"}, [ASKED, ANSWERED]),
    "alpaca with an empty input": ({"instruction": "Hi", "input": "", "output": "Hello!"}, [ASKED, ANSWERED]),
    "alpaca with an input": (
        {"instruction": "Translate.", "input": "Hello!", "output": "Bonjour !"},
        turns("Translate.\nHello!", "Bonjour !"),
    ),
    "alpaca with an input alone": (
        {"instruction": "", "input": "Hi", "output": "Hello!"},
        [ASKED, ANSWERED],
    ),
    "alpaca with a system prompt": (
        {"instruction": "Hi", "input": "", "output": "Hello!", "system": "Be kind.", "history": []},
        [SYSTEM, ASKED, ANSWERED],
    ),
    "alpaca with history": (
        {
            "instruction": "c",
            "input": "d",
            "output": "e",
            "system": "s",
            "history": [["a", "b"], ["1", "2"]],
        },
        turns("a", "b", "1", "2", "c\nd", "e", system="s"),
    ),
    "alpaca of a table": (
        {"instruction": "Hi", "input": None, "output": "Hello!", "system": None, "history": None},
        [ASKED, ANSWERED],
    ),
}


@pytest.mark.parametrize("name", GOOD_RECORDS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_good_records(tmp_path: Path, name: str, suffix: str) -> None:
    record, expected = GOOD_RECORDS[name]
    path = tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        write(path, record, {**record, "id": 7})
    else:
        path.write_text(json.dumps([record, {**record, "id": 7}], indent=2), encoding="utf-8")
    found = scan(path)
    assert [json.loads(one.caption) for one in found] == [expected, expected]
    places = [f"{path}:1", f"{path}:2"] if suffix == ".jsonl" else [f"{path}[0]", f"{path}[1]"]
    assert [str(one.path) for one in found] == places


def test_lines_in_a_json_file_are_read_as_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", GOOD, "", GOOD)
    assert [str(one.path) for one in scan(path)] == [f"{path}:1", f"{path}:3"]
    assert [one.identifier for one in scan(path)] == ["0/1", "0/3"]


def test_a_files_format_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = {"a": GOOD, "b": GOOD_RECORDS["sharegpt"][0], "c": GOOD_RECORDS["alpaca"][0]}
    paths = [write(tmp_path / f"{name}.jsonl", *[row] * 2) for name, row in rows.items()]
    with caplog.at_level(logging.INFO, logger="trainer"):
        scan(*paths)
    told = zip(paths, ("messages", "ShareGPT", "alpaca"), strict=True)
    assert caplog.messages == [f"{path}: 2 conversations ({name})" for path, name in told]


def sharegpt(*pairs: tuple[object, object]) -> dict[str, object]:
    return {"conversations": [{"from": one, "value": text} for one, text in pairs]}


def alpaca(**values: object) -> dict[str, object]:
    return {"instruction": "Hi", "input": "", "output": "Hello!", **values}


# a record, what is told of it, words of the remedy
BAD_RECORDS: dict[str, tuple[object, str, str]] = {
    "no format": ({"text": "Hi"}, "no `messages`, `conversations` or `instruction`", '"messages": [{'),
    "no format but a question": (
        {"question": "Hi", "answer": "x"},
        "no `messages`",
        "`columns` which of its keys hold them: question, answer",
    ),
    "an answer that KTO would unlearn": (
        {"messages": [ASKED, ANSWERED], "label": False},
        "`label: false`",
        "remove the row, or the key",
    ),
    "an alpaca answer that KTO would unlearn": (
        {"instruction": "Hi", "output": "x", "kto_tag": False},
        "`kto_tag: false`",
        "say by `columns` which keys are read",
    ),
    "a role that is a list": (
        {"messages": [ASKED, {"role": ["human"], "content": "b"}]},
        "message 2 has an unknown role: ['human']",
        "one of system, user, assistant",
    ),
    "an answer that is not to be learned": (
        {"messages": [ASKED, {**ANSWERED, "train": False}]},
        "message 2 has `train`, which is not read",
        "only text is learned",
    ),
    "thinking apart": (
        {"messages": [ASKED, {**ANSWERED, "reasoning_content": "Well."}]},
        "message 2 has `reasoning_content`, which is not read",
        "only text is learned",
    ),
    **{
        f"thinking apart, {name}": (
            {"messages": [ASKED, {**ANSWERED, name: "Well."}]},
            f"message 2 has `{name}`, which is not read",
            "only text is learned",
        )
        for name in ("thinking", "reasoning")
    },
    "sharegpt role": (sharegpt(("human", "a"), ("bot", "b")), "role: 'bot'", "`from` is one of human, gpt"),
    "sharegpt tool": (sharegpt(("human", "a"), ("function_call", "b")), "role: 'function_call'", "one of"),
    "sharegpt text": ({"conversations": "Hi"}, "no list", '"conversations": [{'),
    "sharegpt no value": (sharegpt(("human", "a"), ("gpt", None)), "message 2 is not a text", "`value`"),
    "sharegpt two ways": (
        {"conversations": [{"from": "human", "value": "a"}, ANSWERED]},
        "message 2 has no `from`",
        "`from` is one of",
    ),
    "sharegpt begins with an answer": (sharegpt(("gpt", "a"), ("human", "b")), "first message", "begin"),
    "sharegpt ends with a question": (
        sharegpt(("human", "a"), ("gpt", "b"), ("human", "c")),
        "the last message is the user's",
        "add the assistant's answer",
    ),
    "alpaca without an output": ({"instruction": "Hi", "input": ""}, "`output` is empty", "add the answer"),
    "alpaca with a blank output": (alpaca(output=" \n"), "`output` is empty", "add the answer"),
    "alpaca with two outputs": (alpaca(output=["a", "b"]), "`output` is not a text", "one text"),
    "alpaca without a question": (
        alpaca(instruction=""),
        "`instruction` and `input` are empty",
        "instruction",
    ),
    "alpaca with a number": (alpaca(input=7), "`input` is not a text", "one text"),
    "alpaca with a system list": (alpaca(system=["x"]), "`system` is not a text", "one text"),
    "alpaca with a history text": (alpaca(history="x"), "`history` is no list", '[["Hi", "Hello!"]'),
    "alpaca with half a pair": (
        alpaca(history=[["a", "b"], ["c"]]),
        "pair 2 of `history` is not a list of a question and an answer",
        '[["Hi", "Hello!"]',
    ),
    "alpaca with pairs as objects": (
        alpaca(history=[{"user": "a", "assistant": "b"}]),
        "pair 1 of `history`",
        '[["Hi", "Hello!"]',
    ),
    "alpaca with an empty pair": (alpaca(history=[["a", ""]]), "pair 1 of `history` has an empty", "remove"),
    "alpaca with half a character": (alpaca(output="\ud800"), "surrogate", "the character itself"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_bad_records(tmp_path: Path, name: str, suffix: str) -> None:
    record, what, remedy = BAD_RECORDS[name]
    path = tmp_path / f"a{suffix}"
    path.write_text(json.dumps(record if suffix == ".jsonl" else [record]) + "\n")
    ((where, told, advice),) = problems(path)
    assert where == (f"{path}:1" if suffix == ".jsonl" else f"{path}[0]")
    assert what in told
    assert remedy in advice


@pytest.mark.parametrize(
    ("name", "text", "where", "what", "remedy"),
    [
        ("a.json", "[\n  {},\n  {]\n", ":3", "not valid JSON: ", "write [{"),
        ("a.json", "[" * 100_000, "", "not valid JSON: ", "write [{"),
        ("a.json", '[{"output": "a", "output": "b"}]', "[0]", "the key 'output' is there twice", "keep one"),
        ("a.json", '[{"output": "a", "output": "b"},]', ":1", "not valid JSON", "write ["),
        ("a.json", json.dumps({"data": [GOOD]}, indent=2), "", "neither a JSON array nor JSON lines", "[{"),
        ("a.json", '"text"', "", "neither a JSON array nor JSON lines", "one conversation a line"),
        ("a.json", "[]", "", "holds no conversation", "write"),
        ("a.json", " \n", "", "holds no conversation", "write"),
        ("a.json", "[null]", "[0]", "not a JSON object", "write"),
        ("a.json", '["x"]', "[0]", "not a JSON object", "write"),
        ("a.jsonl", json.dumps([GOOD]), "", "begins as a JSON array does", "name it .json"),
        ("a.csv", "instruction,output", "", "neither .jsonl, .json nor .parquet", "convert"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, where: str, what: str, remedy: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    ((place, told, advice),) = problems(path)
    assert place == f"{path}{where}"
    assert what in told
    assert remedy in advice


def test_an_array_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'["\xff"]')
    assert problems(path) == [(f"{path}:1", "the text is not UTF-8 (byte 2)", "save it as UTF-8")]
    path.write_bytes('[\n{"instruction": "a",\n "output": "\u2013"}]'.encode("cp1252"))
    assert problems(path) == [(f"{path}:3", "the text is not UTF-8 (byte 12)", "save it as UTF-8")]


def test_keys_that_are_there_twice_in_an_array_are_those_items(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    twice = '{"instruction": "a", "output": "b", "output": "c"}'
    inner = '{"messages": [{"role": "user", "role": "user", "content": "a"}]}'
    path.write_text(f"[\n{json.dumps(GOOD)} ,\n{twice}, {inner},{json.dumps(GOOD)}\n]\n")
    found = [(place, what) for place, what, _ in problems(path)]
    assert found == [
        (f"{path}[1]", "the key 'output' is there twice"),
        (f"{path}[2]", "the key 'role' is there twice"),
    ]
    config = RunConfig(
        family="any",
        model=ModelSection(pretrained_model_name_or_path="any"),
        data=DataSection(sets=(DataSet(chat_file=path),), on_bad_file="skip"),
        output_dir=Path("any"),
    )
    assert [one.identifier for one in chat.scan(config, None).records] == ["0/0", "0/3"]


@pytest.mark.parametrize("on_bad_file", ["error", "skip"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_formats_are_not_mixed_in_a_file(tmp_path: Path, suffix: str, on_bad_file: str) -> None:
    rows: Sequence[object] = [GOOD, alpaca(), sharegpt(("human", "a"), ("gpt", "b")), GOOD]
    path = tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        write(path, *rows)
    else:
        path.write_text(json.dumps(rows))
    config = RunConfig(
        family="any",
        model=ModelSection(pretrained_model_name_or_path="any"),
        data=DataSection.model_validate({"sets": [DataSet(chat_file=path)], "on_bad_file": on_bad_file}),
        output_dir=Path("any"),
    )
    with pytest.raises(DataError) as caught:
        chat.scan(config, None)
    first, *others = (
        [f"{path}:{line}" for line in (1, 2, 3)]
        if suffix == ".jsonl"
        else [f"{path}[{index}]" for index in range(3)]
    )
    told = [(problem.where, problem.what) for problem in caught.value.problems]
    assert told == [
        (others[0], f"the row is alpaca, and the file is messages since {first}"),
        (others[1], f"the row is ShareGPT, and the file is messages since {first}"),
    ]
    assert all("one format in a file" in problem.remedy for problem in caught.value.problems)


def test_files_of_different_formats_are_sets_beside_each_other(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", GOOD), write(tmp_path / "b.jsonl", alpaca())
    one, other = scan(first, second)
    assert one.caption == other.caption


def test_a_table_of_alpaca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the columns that a format reads are loaded."""
    selected: list[str] = []

    def read_schema(path: Path) -> Any:
        return SimpleNamespace(names=["id", "output", "instruction", "embedding"])

    def read_table(path: Path, *, columns: list[str]) -> Any:
        selected.extend(columns)
        return SimpleNamespace(to_pylist=lambda: [{"instruction": "Hi", "output": "Hello!"}])

    table = SimpleNamespace(read_schema=read_schema, read_table=read_table)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", table)
    (record,) = scan(tmp_path / "a.parquet")
    assert json.loads(record.caption) == [ASKED, ANSWERED]
    assert sorted(selected) == ["instruction", "output"]


def test_a_table_whose_answers_are_marked_as_bad_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KTO's column is loaded beside those of the format."""
    row = {"instruction": "Hi", "output": "Hello!", "label": False}
    table = SimpleNamespace(
        read_schema=lambda path: SimpleNamespace(names=list(row)),
        read_table=lambda path, *, columns: SimpleNamespace(
            to_pylist=lambda: [{name: row[name] for name in columns}]
        ),
    )
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", table)
    ((place, what, _),) = problems(tmp_path / "a.parquet")
    assert place == f"{tmp_path / 'a.parquet'}:1" and "`label: false`" in what


def test_words_of_sharegpt_are_offered_only_where_they_are_not_read(tmp_path: Path) -> None:
    ((_, _, remedy),) = problems(write(tmp_path / "a.jsonl", sharegpt(("human", "a"), ("bot", "b"))))
    assert remedy == "`from` is one of human, gpt, system, user, assistant"
    ((_, _, remedy),) = problems(write(tmp_path / "b.jsonl", {"messages": [{"role": "bot", "content": "a"}]}))
    assert remedy == "`role` is one of system, user, assistant"
