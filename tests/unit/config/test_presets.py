"""`--preset`: over the files, below variables and `--set`; what it replaces is told, with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli.options import Layers
from trainer.config.reading import presets
from trainer.config.reading.load import Loaded, load
from trainer.errors import ConfigError

LEAST = "family: flux1_dev\ndata: {sets: [{img_dir: images}]}\noutput_dir: out\n"


def loaded(folder: Path, *chosen: str, text: str = "", overrides: tuple[str, ...] = ()) -> Loaded:
    file = folder / "c.yaml"
    file.write_text(LEAST + text)
    return Layers([file], overrides, presets=chosen).load()


def test_a_preset_is_over_files_and_below_what_names_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER__TRAIN__LR_WARMUP_STEPS", "7")
    text = "train: {max_train_steps: 700, lr_scheduler: cosine}\nlora: {rank: 64, alpha: 64}\n"
    one = loaded(tmp_path, "style", text=text, overrides=("lora.alpha=3",))
    assert (one.config.lora.rank, one.sources["lora.rank"]) == (32, "preset style")
    assert (one.config.train.max_train_steps, one.config.lora.target_modules) == (2000, "all-linear")
    assert (one.config.lora.alpha, one.sources["lora.alpha"]) == (3.0, "--set lora.alpha")
    assert one.config.train.lr_warmup_steps == 7
    # what is the same is no news
    file = tmp_path / "c.yaml"
    assert one.notes == (
        f"preset style: lora.rank 32, not 64 ({file}:5); train.max_train_steps 2000, not 700 ({file}:4)",
        "preset style: not used: lora.alpha (--set lora.alpha),"
        " train.lr_warmup_steps (TRAINER__TRAIN__LR_WARMUP_STEPS)",
    )


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_matters_on_a_shipped_file(name: str) -> None:
    """Shipped files write every key that presets have."""
    shipped = presets.shipped_folder() / "flux1_dev_lora.yaml"
    one = Layers([shipped], presets=(name,)).load()
    assert one.config != Layers([shipped]).load().config
    assert not [note for note in one.notes if "not used" in note]


def test_the_file_of_a_preset_before_ones_own_is_below_it(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(LEAST + "lora: {rank: 2}\n")
    preset = presets.shipped_folder() / "presets" / "style.yaml"
    one = Layers([preset, file]).load()
    assert (one.config.lora.rank, one.config.lora.alpha, one.notes) == (2, 32, ())


def test_family_values_are_below_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("family: tiny\nmodel: {pretrained_model_name_or_path: m}\n" + LEAST.partition("\n")[2])
    family = {"tiny": {"lora": {"rank": 5}, "train": {"seed": 9}}}
    one = load([file], chosen_presets=("concept",), family_defaults=family, environ={})
    assert (one.config.lora.rank, one.sources["lora.rank"]) == (8, "preset concept")
    assert (one.config.train.seed, one.sources["train.seed"]) == (9, "family tiny")


@pytest.mark.parametrize("chosen", [("style,fast",), ("style", "fast"), ("style, fast",)])
def test_a_later_preset_wins_and_what_it_hides_is_told(tmp_path: Path, chosen: tuple[str, ...]) -> None:
    one = loaded(tmp_path, *chosen)
    assert one.sources["lora.rank"] == "preset fast"
    assert one.sources["train.lr_scheduler"] == "preset style"
    (note,) = one.notes
    assert note.startswith("preset style: not used: ") and "lora.rank (preset fast)" in note
    assert "train.lr_scheduler" not in note


def test_keys_without_effect_are_told_and_no_error(tmp_path: Path) -> None:
    one = loaded(tmp_path, "concept", text="method: full\n")
    assert one.notes == (
        "preset concept: not used: lora.rank (without effect here), lora.alpha (without effect here),"
        " lora.target_modules (without effect here)",
    )


def test_a_list_that_is_shorter_above_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "mine.yaml").write_text("validation: {prompts: [a cat, a dog, a hen]}\n")
    monkeypatch.setattr(presets, "shipped_folder", lambda: tmp_path)
    one = loaded(tmp_path, "mine", overrides=("validation.prompts=[a cow]",))
    assert one.config.validation.prompts == ("a cow",)
    (note,) = one.notes
    assert note.startswith("preset mine: not used: validation.prompts (--set validation.prompts)")


def test_what_a_preset_contradicts_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, "low-vram", text="features: {activation_budget: 0.5}\n")
    assert "`features.activation_checkpointing: true` (preset low-vram)" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"), [("caracter", "did you mean `character`?"), ("", "known: "), ("../x", "known: ")]
)
def test_an_unknown_preset(tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, name)
    (problem,) = caught.value.problems
    assert problem.where == f"--preset {name}" and hint in problem.remedy
    assert "character, concept, fast" in problem.remedy


def test_a_package_without_files_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "__file__", str(tmp_path / "trainer" / "config" / "presets.py"))
    monkeypatch.setattr(presets.sys, "prefix", str(tmp_path / "venv"))
    with pytest.raises(ConfigError, match="no train_configs/presets in"):
        presets.names()
    # as in the images, where they lie beside the virtual environment
    (tmp_path / "train_configs" / "presets").mkdir(parents=True)
    (tmp_path / "train_configs" / "presets" / "mine.yaml").write_text("lora: {rank: 3}\n")
    monkeypatch.setattr(presets, "__file__", str(tmp_path / "venv" / "lib" / "x" / "presets.py"))
    assert presets.names() == ("mine",)
    assert loaded(tmp_path, "mine").config.lora.rank == 3
