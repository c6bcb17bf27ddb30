"""Held-out conversations are named as training sets are, with columns or as an entry of a dataset_info.json;
and names of chat templates.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli.options import Layers
from trainer.errors import ConfigError
from trainer.ways import chat_templates

LEAST = "family: llama\nmethod: lora\ndata: {sets: [{chat_file: c.jsonl}]}\noutput_dir: out\n"


def problems(folder: Path, text: str) -> list[tuple[str, str]]:
    file = folder / "c.yaml"
    file.write_text(LEAST + text)
    try:
        Layers([file]).load()
    except ConfigError as error:
        return [(one.what, one.remedy) for one in error.problems]
    return []


@pytest.mark.parametrize(
    "text",
    [
        "chat_file: d.jsonl, columns: {messages: m}",
        "chat_file: d.jsonl, columns: {prompt: q, response: a}",
        "dataset_info: info.json, name: mine",
    ],
)
def test_they_are_taken(text: str, tmp_path: Path) -> None:
    assert problems(tmp_path, f"validation: {{{text}}}\n") == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("columns: {messages: m}", "`validation.columns` has no effect without `chat_file`"),
        (
            "chat_file: d.jsonl, columns: {prompt: q}",
            "`validation.columns` does not say where conversations are",
        ),
        ("chat_file: d.jsonl, name: mine", "`validation.name` has no effect without `dataset_info`"),
        ("dataset_info: i.json", "`validation.dataset_info` has no effect without `name`"),
        (
            "chat_file: d.jsonl, dataset_info: i.json, name: mine",
            "`validation.dataset_info` and `validation.chat_file` both name held-out samples",
        ),
        (
            "dataset_info: i.json, name: mine, held_out: 2",
            "`validation.dataset_info` and `validation.held_out: 2`",
        ),
        ("chat_file: c.jsonl", "`validation.chat_file`: c.jsonl is a training set"),
    ],
)
def test_what_contradicts_itself_is_told(text: str, what: str, tmp_path: Path) -> None:
    found = problems(tmp_path, f"validation: {{{text}}}\n")
    assert [one for one, _ in found if one.startswith(what)], found


def test_one_entry_is_trained_on_and_another_is_held_out(tmp_path: Path) -> None:
    sets = "data: {sets: [{dataset_info: i.json, name: mine}]}\n"
    other = sets + "validation: {dataset_info: i.json, name: other}\n"
    same = sets + "validation: {dataset_info: i.json, name: mine}\n"
    text = "family: llama\noutput_dir: out\n"
    file = tmp_path / "c.yaml"
    file.write_text(text + other)
    Layers([file]).load()
    file.write_text(text + same)
    with pytest.raises(ConfigError, match="is a training set"):
        Layers([file]).load()


def test_templates_are_named_or_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text("x")

    def told(value: str) -> list[tuple[str, str]]:
        text = LEAST.replace("data: {", f"data: {{chat_template: {value}, ")
        file = tmp_path / "c.yaml"
        file.write_text(text)
        try:
            Layers([file]).load()
        except ConfigError as error:
            return [(one.what, one.remedy) for one in error.problems]
        return []

    assert told("chatml") == told("auto") == told("mine.jinja") == []
    ((what, remedy),) = told("chatlm")
    assert what.startswith("`data.chat_template`: chatlm is neither auto, alpaca, chatml")
    assert remedy.startswith("did you mean `chatml`?")
    ((what, remedy),) = told("other.jinja")
    assert what == "`data.chat_template`: other.jinja is no file" and remedy.startswith("write auto, alpaca")


def test_a_template_that_no_file_can_be_called_is_told() -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .* null byte"):
        chat_templates.text_of("a\0b")


def test_a_name_with_a_null_byte_is_a_name_like_others(tmp_path: Path) -> None:
    """No path is made of it: a list of data sets is JSON, whose keys may have any character."""
    one = r'dataset_info: info.json, name: "a\0b"'
    sets = f"data: {{sets: [{{{one}}}, {{dataset_info: info.json, name: b}}]}}\n"
    file = tmp_path / "c.yaml"
    file.write_text(f"family: llama\nmethod: lora\n{sets}output_dir: out\n")
    assert len(Layers([file]).load().config.data.sets) == 2
    file.write_text(file.read_text() + f"validation: {{{one}}}\n")
    with pytest.raises(ConfigError, match="is a training set"):
        Layers([file]).load()
