"""`trainer config` and `trainer families` as people see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import families
from trainer.cli import main
from trainer.cli.options import Layers

TEXT = """\
family: flux1_dev
data: {sets: [{img_dir: images}]}
output_dir: out
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(TEXT, encoding="utf-8")
    return "c.yaml"


def test_show_prints_what_loads_again(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [config, "--set", "train.seed=3", "--output", "elsewhere"]
    assert main(["config", "show", *arguments]) == 0
    text = capsys.readouterr().out
    assert "output_dir: elsewhere" in text
    (tmp_path / "shown.yaml").write_text(text, encoding="utf-8")
    again = Layers([Path("shown.yaml")]).load()
    assert again.config == Layers([Path(config)], ["train.seed=3"], None, Path("elsewhere")).load().config


def test_check_says_ok_for_each_file(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.yaml").write_text("train: {max_train_steps: 7}\n", encoding="utf-8")
    assert main(["config", "check", config, "d.yaml", "--dataset", "images"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok: c.yaml: ")
    assert lines[1] == "ok: d.yaml: 1 value in effect"
    assert lines[2] == "ok: flux1_dev, lora, 7 steps, 1024 px -> out"


def test_a_language_model_has_a_length_and_no_pixels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "train_configs/llama_lora.yaml"]) == 0
    assert "llama, lora, 500 steps, rows of 4096 tokens -> /output/llama-lora" in capsys.readouterr().out


def test_families_lists_licence_and_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families"]) == 0
    text = capsys.readouterr().out
    for name in families.names():
        family = families.get(name)
        assert f"{name}: {family.title}" in text
        assert family.licence in text
        assert all(preset in text for preset in family.lora_targets)
