"""Layers, sources, and how texts become values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trainer.config.reading.load import Loaded, load
from trainer.errors import ConfigError

FAMILIES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model": {"pretrained_model_name_or_path": "org/tiny"},
        "train": {"seed": 1},
        "lora": {"rank": 1},
    },
    "huge": {"model": {"pretrained_model_name_or_path": "org/huge"}, "validation": {"prompts": ("a", "b")}},
}
BASE = """\
family: tiny
data: {sets: [{img_dir: /images}]}
output_dir: /out
"""


def loaded(folder: Path, *texts: str, **arguments: Any) -> Loaded:
    paths = []
    for index, text in enumerate((BASE, *texts)):
        paths.append(folder / f"{index}.yaml")
        paths[-1].write_text(text, encoding="utf-8")
    arguments.setdefault("environ", {})
    return load(paths, family_defaults=FAMILIES, **arguments)


def test_each_layer_covers_the_one_below(tmp_path: Path) -> None:
    def seed(*texts: str, **arguments: Any) -> tuple[int, str]:
        got = loaded(tmp_path, *texts, **arguments)
        return got.config.train.seed, got.sources["train.seed"]

    first, second = "train:\n  seed: 2\n", "train: {seed: 3}\n"
    environ, override = {"TRAINER__TRAIN__SEED": "4"}, ["train.seed=5"]
    assert loaded(tmp_path, overrides=["family=huge"]).sources["train.seed"] == "default"
    assert seed() == (1, "family tiny")
    assert seed(first) == (2, f"{tmp_path}/1.yaml:2")
    assert seed(first, second) == (3, f"{tmp_path}/2.yaml:1")
    assert seed(first, environ=environ) == (4, "TRAINER__TRAIN__SEED")
    assert seed(first, environ=environ, overrides=override) == (5, "--set train.seed")
    assert seed(overrides=[*override, "train.seed=6"]) == (6, "--set train.seed")


def test_pictures_that_a_file_holds_out_are_told_beside_another_data_set(tmp_path: Path) -> None:
    written = "validation: {img_dir: /held}\n"
    assert loaded(tmp_path, written).notes == ()
    (note,) = loaded(tmp_path, written, dataset=Path("/d")).notes
    assert f"is that of /held (validation.img_dir, {tmp_path}/1.yaml:1)" in note
    for override in ("validation.img_dir=/mine", "validation.img_dir=null"):
        assert loaded(tmp_path, written, dataset=Path("/d"), overrides=[override]).notes == ()


@pytest.mark.parametrize(
    ("kind", "more"),
    [("chat_file", ""), ("chat_file", ", columns: {messages: chat}"), ("dataset_info", ", name: mine")],
)
def test_conversations_that_a_file_holds_out_are_told_so_too(tmp_path: Path, kind: str, more: str) -> None:
    written = f"validation: {{{kind}: /held.json{more}}}\n"
    assert loaded(tmp_path, written).notes == ()
    (note,) = loaded(tmp_path, written, dataset=Path("/d.jsonl")).notes
    assert f"is that of /held.json (validation.{kind}, {tmp_path}/1.yaml:1)" in note
    overrides = re.findall(r"--set (\S+)", note)
    done = loaded(tmp_path, written, dataset=Path("/d.jsonl"), overrides=overrides)
    assert (
        done.notes == () and done.config.validation.held_out == 4 and not done.config.validation.names_samples
    )


def test_dataset_and_output_cover_everything(tmp_path: Path) -> None:
    overrides = ["output_dir=/set", "data.sets=[{img_dir: /a}, {img_dir: /b}]"]
    got = loaded(tmp_path, overrides=overrides, dataset=Path("/d"), output=Path("/o"))
    assert [str(one.img_dir) for one in got.config.data.sets] == ["/d"]
    assert got.config.output_dir == Path("/o")
    assert got.sources["data.sets.0.img_dir"] == "--dataset"
    assert got.sources["data.sets.0.repeats"] == "default"
    assert "data.sets.1.img_dir" not in got.sources
    assert got.sources["output_dir"] == "--output"


def test_the_family_is_read_from_the_topmost_layer_first(tmp_path: Path) -> None:
    got = loaded(tmp_path, environ={"TRAINER__FAMILY": "huge"})
    assert got.config.model.pretrained_model_name_or_path == "org/huge"
    assert got.config.train.seed == 0
    assert got.sources["model.pretrained_model_name_or_path"] == "family huge"


def test_lists_are_replaced_and_sections_are_merged(tmp_path: Path) -> None:
    text = "family: huge\nvalidation:\n  seed: 9\n"
    assert loaded(tmp_path, text).config.validation.prompts == ("a", "b")
    got = loaded(tmp_path, text, "validation: {prompts: [c]}\n")
    assert got.config.validation.prompts == ("c",)
    assert got.config.validation.seed == 9
    assert "validation.prompts.1" not in got.sources


@pytest.mark.parametrize(
    ("texts", "arguments", "expected"),
    [
        (("lora: {rank_pattern: {to_q: 2}}", "lora: {rank_pattern: {to_k: 3}}"), {}, {"to_q": 2, "to_k": 3}),
        (("lora: {rank_pattern: {to_q: 2}}", "lora: {rank_pattern: {}}"), {}, {}),
        (("lora: {rank_pattern: {to_q: 2}}", "lora:\n  rank_pattern:\n"), {}, {}),
        (("lora: {rank_pattern: {to_q: 2}}",), {"overrides": ["lora.rank_pattern={}"]}, {}),
        (("lora: {rank_pattern: {to_q: 2}}",), {"overrides": ["lora.rank_pattern=null"]}, {}),
        (("lora: {rank_pattern: {to_q: 2}}",), {"environ": {"TRAINER__LORA__RANK_PATTERN": "{}"}}, {}),
        (
            (
                "lora: {rank_pattern: {to_q: 2}}",
                "lora: {rank_pattern: {}}",
                "lora: {rank_pattern: {to_v: 4}}",
            ),
            {},
            {"to_v": 4},
        ),
        (("lora: {rank_pattern: {to_q: 2}}", "lora: {}"), {}, {"to_q": 2}),
    ],
)
def test_a_mapping_of_lower_layers_is_added_to_or_emptied(
    tmp_path: Path, texts: tuple[str, ...], arguments: dict[str, Any], expected: dict[str, int]
) -> None:
    assert loaded(tmp_path, *texts, **arguments).config.lora.rank_pattern == expected


def test_a_number_of_processes_on_the_command_line_is_blamed_on_its_option(tmp_path: Path) -> None:
    got = loaded(tmp_path, overrides=["parallel.gpus=3"], gpus="2")
    assert (got.config.parallel.gpus, got.sources["parallel.gpus"]) == (2, "--gpus")
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, gpus="0")
    assert [problem.where for problem in caught.value.problems] == ["--gpus"]


def test_a_budget_on_the_command_line_is_blamed_on_its_option(tmp_path: Path) -> None:
    got = loaded(tmp_path, overrides=["features.memory_budget=3GiB"], budget="2GiB")
    assert (got.config.features.memory_budget, got.sources["features.memory_budget"]) == ("2GiB", "--budget")
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, budget="many")
    assert [problem.where for problem in caught.value.problems] == ["--budget"]


def test_every_value_has_a_source(tmp_path: Path) -> None:
    got = loaded(tmp_path)

    def keys(value: Any, path: tuple[str, ...] = ()) -> set[str]:
        if isinstance(value, dict):
            return set().union(*(keys(item, (*path, name)) for name, item in value.items()))
        own = {".".join(path)}
        if isinstance(value, tuple):
            own |= set().union(*(keys(item, (*path, str(i))) for i, item in enumerate(value)))
        return own

    missing = keys(got.config.model_dump()) - set(got.sources)
    assert not missing


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-4", 1e-4), ("1.0E-4", 1e-4), (".5", 0.5), ("1", 1.0), ("'1e-4'", 1e-4)],
)
def test_numbers_by_declared_type(tmp_path: Path, written: str, value: float) -> None:
    assert loaded(tmp_path, f"train: {{learning_rate: {written}}}").config.train.learning_rate == value


@pytest.mark.parametrize(
    "word", ["1e-4", "off", "no", "true", "010", "2024-01-01", "12:30", "'null'", "0x10"]
)
def test_text_fields_keep_text(tmp_path: Path, word: str) -> None:
    got = loaded(tmp_path, f"data: {{trigger_word: {word}}}\nmodel: {{revision: {word}}}")
    assert got.config.data.trigger_word == word.strip("'")
    assert got.config.model.revision == word.strip("'")
    if "'" not in word:
        assert loaded(tmp_path, overrides=[f"data.trigger_word={word}"]).config.data.trigger_word == word


@pytest.mark.parametrize("text", ["'", '"a" b', "it's '", "'a\""])
def test_quotes_inside_a_text_are_kept(tmp_path: Path, text: str) -> None:
    assert loaded(tmp_path, overrides=[f"data.trigger_word={text}"]).config.data.trigger_word == text


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("auto", "auto"),
        ("on", True),
        ("yes", True),
        ("True", True),
        ("off", False),
        ("no", False),
        ("false", False),
    ],
)
def test_switches(tmp_path: Path, word: str, value: object) -> None:
    assert loaded(tmp_path, f"features: {{tf32: {word}}}").config.features.tf32 == value
    assert loaded(tmp_path, overrides=[f"features.tf32={word}"]).config.features.tf32 == value


def test_null_unsets_what_may_be_unset(tmp_path: Path) -> None:
    word = "data: {trigger_word: sks}\n"
    assert loaded(tmp_path, word, "data:\n  trigger_word:\n").config.data.trigger_word is None
    assert loaded(tmp_path, word, overrides=["data.trigger_word=null"]).config.data.trigger_word is None
    assert (
        loaded(tmp_path, word, environ={"TRAINER__DATA__TRIGGER_WORD": ""}).config.data.trigger_word is None
    )


def test_a_section_of_comments_changes_nothing(tmp_path: Path) -> None:
    got = loaded(tmp_path, "train:\n  max_train_steps: 7\n", "train:\n  # seed: 3\nfeatures:\n")
    assert got.config.train.max_train_steps == 7


def test_bytes_of_windows_editors(tmp_path: Path) -> None:
    file = tmp_path / "windows.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    got = load([file], family_defaults=FAMILIES, environ={})
    assert got.config.output_dir == Path("/out")
    assert got.sources["output_dir"] == f"{file}:3"


def test_structured_overrides(tmp_path: Path) -> None:
    overrides = [
        "validation.prompts=[a cat, 'a dog, sitting']",
        "lora.target_modules=[to_q]",
        "train={seed: 3}",
    ]
    config = loaded(tmp_path, overrides=overrides).config
    assert config.validation.prompts == ("a cat", "a dog, sitting")
    assert config.lora.target_modules == ("to_q",)
    assert config.train.seed == 3
    # a text field takes brackets and equals signs as they are
    assert loaded(tmp_path, overrides=["data.trigger_word=[V]=1"]).config.data.trigger_word == "[V]=1"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = "output_dir: ~/runs\nmodel: {pretrained_model_name_or_path: ~/flux}\ndata: {cache_dir: ~/cache}\n"
    config = loaded(tmp_path, text).config
    assert config.output_dir == Path("/home/me/runs")
    assert config.data.cache_dir == Path("/home/me/cache")
    assert config.model.pretrained_model_name_or_path == "/home/me/flux"


def test_resume_takes_a_word_or_a_folder(tmp_path: Path) -> None:
    def resume(text: str) -> object:
        return loaded(tmp_path, overrides=[f"checkpoint.resume_from_checkpoint={text}"]).config.checkpoint

    assert resume("auto").resume_from_checkpoint == "auto"  # type: ignore[attr-defined]
    assert resume("runs/x/step-5").resume_from_checkpoint == Path("runs/x/step-5")  # type: ignore[attr-defined]


def test_defaults_of_the_family_are_not_held_against_the_user(tmp_path: Path) -> None:
    # the family brings a LoRA rank, which has no effect here, but nobody wrote it
    assert loaded(tmp_path, overrides=["method=full"]).config.method == "full"
    with pytest.raises(ConfigError, match=r"--set lora\.rank: .*no effect"):
        loaded(tmp_path, overrides=["method=full", "lora.rank=1"])


def test_presets_are_checked_only_where_known(tmp_path: Path) -> None:
    overrides = ["lora.target_modules=nothing"]
    assert loaded(tmp_path, overrides=overrides).config.lora.target_modules == "nothing"
    with pytest.raises(ConfigError, match="no preset of tiny"):
        loaded(tmp_path, overrides=overrides, lora_presets={"tiny": ("attention",)})


def test_other_peoples_variables_are_left_alone(tmp_path: Path) -> None:
    environ = {
        "TRAINER_SERVICE_HOST": "10.0.0.1",
        "TRAINER_SERVICE_PORT_METRICS": "9464",
        "TRAINER_PORT": "tcp://10.0.0.1:9464",
        "TRAINER_PORT_9464_TCP_ADDR": "10.0.0.1",
        "TRAINER_METRIC_PORT": "tcp://10.0.0.1:9464",
        "TRAINER_OF_DOGS": "Ann",
    }
    assert loaded(tmp_path, environ=environ).config == loaded(tmp_path).config
