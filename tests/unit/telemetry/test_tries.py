"""Records of tries, and the configuration that draws one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import ROOT
from trainer.config.writing.dump import dump
from trainer.errors import DataError
from trainer.families.loading import load_config
from trainer.telemetry.run_folder import tries
from trainer.telemetry.run_folder.tries import Try

ONE = Try(prompts=("an owl",), loras=("lora/a.safetensors",), resolution=64, num_inference_steps=2)
SCORED = (
    "validation.prompts=[an owl, a car]",
    "validation.metrics=[clip_t, nearest_train]",
    "validation.clip_model=/models/clip",
    "validation.dinov2_model=/models/dinov2",
    "validation.copy_threshold=0.9",
    "validation.early_stop.patience=3",
)


def test_a_run_that_is_measured_and_ends_early_can_be_tried(tmp_path: Path) -> None:
    """Its own record names all that belongs to its metrics, which a try does not ask for."""
    loaded = load_config([ROOT / "train_configs" / "quickstart.yaml"], overrides=SCORED)
    record = tmp_path / "config.resolved.yaml"
    record.write_text(dump(loaded.config, loaded.sources))
    again = load_config([record])
    assert again.config.validation.metrics and again.config.validation.early_stop is not None
    drawn = tries.with_try(again, ONE).config.validation
    assert (drawn.metrics, drawn.early_stop, drawn.prompts) == ((), None, ("an owl",))


@pytest.mark.parametrize(
    "wrong",
    [
        {"resolution": 5},
        {"resolution": 5000},
        {"prompts": (" ",)},
        {"prompts": ()},
        {"seed": 2**32},
        {"num_inference_steps": 0},
        {"strength": 1.6},
        {"loras": ("../other/lora/a.safetensors",)},
    ],
    ids=str,
)
def test_a_record_with_other_values_is_told(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / tries.RECORD).write_text(tries.to_json(dataclasses.replace(ONE, **wrong)))
    with pytest.raises(DataError) as caught:
        tries.read_record(tmp_path)
    assert str(tmp_path / tries.RECORD) in str(caught.value)


@pytest.mark.parametrize("key", ["prompts", "negative_prompt"])
def test_a_text_with_a_secret_is_refused_and_not_changed(key: str) -> None:
    text = "a poster of https://me:secret@example.org/a"
    with pytest.raises(DataError, match="a password or a token") as caught:
        tries.to_json(dataclasses.replace(ONE, **{key: (text,) if key == "prompts" else text}))
    assert "secret@" not in str(caught.value)
