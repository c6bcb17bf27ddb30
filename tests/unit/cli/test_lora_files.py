"""A LoRA file that a command is given: its family and its kind, read before anything else is done with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.cli.test_jobs import TEXT
from trainer.cli import main
from trainer.telemetry.supervising import supervisor

COMMANDS = (["sample", "--prompt", "a cat", "c.yaml", "--lora"], ["verify-lora"])


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_flux1_dev: Path) -> list[dict[str, Any]]:
    """Specs of the jobs that commands begin: a supervisor only reads them."""
    seen: list[dict[str, Any]] = []

    def supervise(command: Sequence[str], **_: object) -> int:
        seen.append(json.loads(Path(command[-1]).read_text()))
        return 75

    monkeypatch.setattr(supervisor, "supervise", supervise)
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TRAINER__MODEL__PRETRAINED_MODEL_NAME_OR_PATH", str(tiny_flux1_dev))
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(TEXT, encoding="utf-8")
    return seen


def words(command: Sequence[str], *more: str) -> list[str]:
    config = ["--config", "c.yaml"] if command == ["verify-lora"] else []
    return [*command, "one.safetensors", *config, *more]


def write(*parts: str, **metadata: str) -> None:
    save_file({f"transformer.a.{part}": torch.ones(1) for part in parts}, "one.safetensors", metadata or None)


@pytest.mark.parametrize("command", COMMANDS)
def test_one_of_another_family_is_told_before_anything_is_downloaded(
    command: list[str], specs: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    write("lora_B.weight", family="llama")
    assert main(words(command)) == 65
    told = capsys.readouterr().err
    assert "it says that it is a LoRA of llama, and the configuration is of flux1_dev" in told
    assert "give a configuration with family: llama" in told
    assert not specs


def test_one_of_a_family_with_the_same_model_is_tried(specs: list[dict[str, Any]]) -> None:
    write("lora_B.weight", family="flux1_kontext")
    assert main(words(COMMANDS[0])) == 75
    assert specs[0]["lora_file"].endswith("one.safetensors")
    assert specs[0]["config"]["lora"]["type"] == "lora"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("parts", "kind"),
    [(("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"), "dora"), (("lokr_w1", "lokr_w2"), "lokr")],
)
def test_a_base_is_loaded_for_the_kind_of_the_file(
    parts: tuple[str, ...],
    kind: str,
    command: list[str],
    specs: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the configuration alone its weights might be stored as bytes, which such an adapter would read."""
    write(*parts)
    for value in ("lora.dropout=0.1", "features.compile=true"):  # of training alone
        assert main(words(command, "--set", value)) == 75
        assert specs.pop()["config"]["lora"]["type"] == kind
    for stored in ("features.weights=nf4", "features.compute=fp8"):
        assert main(words(command, "--set", stored)) == 78
        told = capsys.readouterr().err
        assert f"`lora.type: {kind}` contradicts" in told and stored.partition("=")[0] in told
    assert not specs
