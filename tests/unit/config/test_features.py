"""The keys that the hardware plan reads: sizes, shares, and what contradicts what."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.reading.load import Loaded, load
from trainer.errors import ConfigError


def loaded(folder: Path, features: str, method: str = "lora") -> Loaded:
    path = folder / "run.yaml"
    path.write_text(
        f"family: x\nmethod: {method}\nmodel: {{pretrained_model_name_or_path: a/b}}\n"
        f"data: {{sets: [{{img_dir: /data}}]}}\noutput_dir: /out\nfeatures: {{{features}}}\n"
    )
    return load([path], family_defaults={"x": {}}, environ={})


@pytest.mark.parametrize("text", ["24GiB", "24 GB", "1.5 gib", "512MiB", "800 mb"])
def test_sizes(text: str, tmp_path: Path) -> None:
    found = loaded(tmp_path, f"memory_budget: {text}").config.features.memory_budget
    assert found == text


@pytest.mark.parametrize("text", ["24", "GiB", "-1GiB", "0 GiB", "24 TiB", "24GiBs", "''", "true"])
def test_what_is_no_size_is_told_what_is(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected auto or a size such as 24GiB or 24 GB, got"):
        loaded(tmp_path, f"memory_budget: {text}")


@pytest.mark.parametrize("text", ["0", "1.1", "-0.5", "most"])
def test_a_share_is_between_0_and_1(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected auto or a number above 0 and at most 1"):
        loaded(tmp_path, f"activation_budget: {text}")


@pytest.mark.parametrize("text", ["-1", "2.5", "all", "true"])
def test_blocks_that_wait_are_a_whole_number(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected auto or a whole number of at least 0"):
        loaded(tmp_path, f"block_swap: {text}")


@pytest.mark.parametrize(
    ("features", "method", "says"),
    [
        ("weights: fp8", "full", "fp8 weights are frozen"),
        ("compute: fp8, weights: fp32", "full", "multiplies what bf16 weights are rounded to"),
        ("compute: fp8, weights: bf16", "lora", "multiplies FP8 weights, but `features.weights: bf16`"),
        ("weight_gradient: bf16", "full", "has no effect without `method: full` and `features.compute: fp8`"),
        ("compute: fp8, weight_gradient: bf16", "lora", "has no effect without `method: full`"),
        ("compute: fp8, weights: nf4", "lora", "multiplies FP8 weights, but `features.weights: nf4`"),
        ("activation_budget: 0.5, compile: false", "lora", "only compiled blocks keep a share"),
        ("activation_budget: 0.5, activation_checkpointing: true", "lora", "recomputes blocks whole"),
        ("block_swap: 2", "full", "is for a frozen base, and `method: full` trains it"),
    ],
)
def test_contradictions(features: str, method: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        loaded(tmp_path, features, method)


@pytest.mark.parametrize(
    "features",
    [
        "compute: fp8",
        "compute: fp8, weights: fp8",
        "weights: nf4, modulation: auto, weight_gradient: auto",
        "compute: bf16, weights: fp8",
        "activation_budget: 1, compile: false, activation_checkpointing: true",
        "activation_budget: 0.3, activation_checkpointing: false, compile: true",
        "block_swap: 2, activation_checkpointing: false",
        "block_swap: 2, activation_checkpointing: 1",
        "block_swap: 2, activation_budget: 0.5",
        "block_swap: 8, activation_checkpointing: true, activation_budget: 1",
    ],
)
def test_what_goes_together(features: str, tmp_path: Path) -> None:
    loaded(tmp_path, features)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("false", False), ("auto", "auto"), ("1", 1), ("20", 20), ("yes", True)],
)
def test_blocks_to_recompute_are_a_number_or_all(text: str, value: object, tmp_path: Path) -> None:
    found = loaded(tmp_path, f"activation_checkpointing: {text}").config.features.activation_checkpointing
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "some"])
def test_other_numbers_of_blocks_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        loaded(tmp_path, f"activation_checkpointing: {text}")
