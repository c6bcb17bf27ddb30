"""Mistakes that a start tells before it makes a folder: samples that are not there, and a chat template that
the base's tokenizer cannot write.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.cli.options import Layers
from trainer.modeling.base.tokenizer_files import fitting_templates, lacks_template, split_marks
from trainer.planning.data_rows import absent


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start of its own folders."""
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TRAINER_METRICS_PORT", "0")


def written(folder: Path, base: Path, sets: str) -> Path:
    file = folder / "c.yaml"
    file.write_text(
        f"family: llama\nmodel: {{pretrained_model_name_or_path: {base}, download: never}}\n"
        f"data:\n  max_sequence_length: 64\n  sets:\n    - {sets}\n"
        f"train: {{max_train_steps: 1, lr_warmup_steps: 0}}\noutput_dir: {folder / 'run'}\n"
    )
    return file


@pytest.mark.parametrize("command", ["train", "cache"])
def test_a_file_of_conversations_that_is_not_there_is_told_before_a_folder_is_made(
    command: str, tiny_base: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, tiny_base("llama"), f"chat_file: {tmp_path / 'none.jsonl'}")
    assert main([command, str(file)]) == 65
    said = capsys.readouterr().err
    assert f"{file}:6: `data.sets.0.chat_file`: {tmp_path / 'none.jsonl'} does not exist\n" in said
    assert "-> check its name" in said
    assert not (tmp_path / "run").exists()


def test_an_entry_of_a_list_of_data_sets_whose_file_is_not_there_is_told_so_too(
    tiny_base: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "none.json"}}))
    one = f"{{dataset_info: {tmp_path / 'dataset_info.json'}, name: mine}}"
    assert main(["train", str(written(tmp_path, tiny_base("llama"), one))]) == 65
    assert "`file_name: none.json` does not exist" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_plan_warns_of_samples_that_are_not_there(
    tiny_base: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, tiny_base("llama"), f"chat_file: {tmp_path / 'none.jsonl'}")
    assert main(["plan", str(file), "--json"]) == 0
    warnings = " ".join(json.loads(capsys.readouterr().out)["warnings"])
    assert f"{file}:6: `data.sets.0.chat_file`: {tmp_path / 'none.jsonl'} does not exist" in warnings


@pytest.mark.parametrize("name", ["README.md", "set.zip", "table.csv"])
def test_a_file_in_place_of_a_folder_is_told_by_a_plan(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b"")
    file = tmp_path / "c.yaml"
    file.write_text(f"family: flux1_dev\ntrain: {{max_train_steps: 1}}\noutput_dir: {tmp_path / 'run'}\n")
    assert main(["plan", str(file), "--dataset", str(tmp_path / name), "--json"]) == 0
    warnings = " ".join(json.loads(capsys.readouterr().out)["warnings"])
    assert f"--dataset: `data.sets.0.img_dir`: {tmp_path / name} is a file, not a folder" in warnings
    assert ("unpack it" in warnings) is (name == "set.zip")


@pytest.mark.parametrize("key", ["img_dir", "control_dir", "mask_dir", "chat_file"])
def test_samples_of_another_kind_are_told_with_their_line(key: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    path, words = tmp_path / "file", "is a file, not a folder"
    more = f"{{img_dir: {tmp_path / 'folder'}, {key}: {path}}}"
    if key == "chat_file":
        path, words = tmp_path / "folder", "is a folder, not a file"
    if key in ("img_dir", "chat_file"):
        more = f"{{{key}: {path}}}"
    file = tmp_path / "c.yaml"
    family = "llama" if key == "chat_file" else "flux1_kontext"
    file.write_text(f"family: {family}\noutput_dir: out\ndata:\n  sets:\n    - {more}\n")
    (problem,) = absent(Layers([file]).load())
    assert (problem.where, problem.what) == (f"{file}:5", f"`data.sets.0.{key}`: {path} {words}")


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_template_whose_marks_the_tokenizer_splits_is_told_before_a_folder_is_made(
    command: str, tiny_base: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat.jsonl").write_bytes(Path("examples/chat.jsonl").read_bytes())
    file = written(tmp_path, tiny_base("llama"), f"chat_file: {tmp_path / 'chat.jsonl'}")
    assert main([command, str(file), "--set", "data.chat_template=chatml"]) == 78
    said = capsys.readouterr().err
    assert (
        "--set data.chat_template: chatml: the base's tokenizer does not have <|im_start|>, <|im_end|>"
        in said
    )
    assert "templates whose marks it has: alpaca, llama3, mistral, zephyr;" in said
    assert not (tmp_path / "run").exists()


def test_a_base_without_a_template_is_told_with_the_line_that_names_it(
    tiny_base: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = shutil.copytree(tiny_base("llama"), tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    file = written(tmp_path, base, f"chat_file: {Path('examples/chat.jsonl').absolute()}")
    assert main(["plan", str(file)]) == 78
    said = capsys.readouterr().err
    assert f"{file}:2: the base model's tokenizer has no chat template" in said
    assert "write data.chat_template: alpaca, llama3, mistral, zephyr, or FILE.jinja" in said
    assert main(["plan", str(file), "--set", "data.chat_template=zephyr"]) == 0


def test_marks_are_found_wherever_a_tokenizer_keeps_them(tmp_path: Path) -> None:
    """Nothing that may be one token counts as split."""

    def write(name: str, content: object) -> None:
        (tmp_path / name).write_text(json.dumps(content))

    assert not lacks_template(tmp_path) and not split_marks(tmp_path, "chatml")  # nothing is known of it
    unigram = {"model": {"vocab": [["<|im_start|>", 0.0], ["a", -1.0]]}, "added_tokens": []}
    write("tokenizer.json", unigram)
    assert split_marks(tmp_path, "chatml") == ["<|im_end|>"]
    assert "chatml" not in fitting_templates(tmp_path)
    write("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "<|im_end|>"}}})
    assert not split_marks(tmp_path, "chatml") and lacks_template(tmp_path)
    write("tokenizer_config.json", {"chat_template": "{{ '<|im_end|>' }}"})
    assert split_marks(tmp_path, "chatml") == ["<|im_end|>"] and not lacks_template(tmp_path)
