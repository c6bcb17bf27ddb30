"""Suggestions where a run does not fit: the nearest change is among them, and each fits as it says."""

from __future__ import annotations

import re

import pytest

from tests.unit.planning.conftest import machine
from tests.unit.planning.test_suggestions import SUGGESTED, loaded
from trainer.errors import HardwareError
from trainer.planning.planning import plan_run
from trainer.words.sizes import gib

ONE = re.compile(r"(?:fits with|or) ([^()]+) \(([^()]+)\)")


def followed(name: str, computer: str, overrides: str) -> dict[str, str]:
    """Suggestions with the peaks that they name, each of which a plan of the changed run has too."""
    asked, facts, written = loaded(name, *overrides.split()), machine(computer), overrides.split()
    assert asked is not None
    with pytest.raises(HardwareError) as caught:
        plan_run(asked, facts, find_model=lambda _: None)
    found = dict(ONE.findall(caught.value.problems[0].remedy))
    for changes, peak in found.items():
        settings = [f"{key}={value}" for key, value in SUGGESTED.findall(changes)]
        changed = loaded(name, *written, *settings)
        assert changed is not None, f"{settings} is refused by the configuration"
        assert gib(plan_run(changed, facts, find_model=lambda _: None).peak_bytes) == peak, changes
    return found


EIGHT, TWO = "several/h200-x8", "several/h200-x2"
STEPS, IN_ROWS = "train.gradient_accumulation_steps", "parallel.gpus: auto and parallel.shard: auto"
SMALL = "features.weights=bf16 features.memory_budget=60GiB features.block_swap=0"
FP8 = "features.weights=fp8 features.block_swap=0 features.memory_budget=20GiB"
RECOMPUTING = "features.activation_checkpointing=false features.activation_budget=0.5"


@pytest.mark.parametrize(
    ("computer", "name", "overrides", "nearest"),
    [
        (EIGHT, "qwen_image_full", "parallel.gpus=1", "parallel.gpus: auto"),
        (EIGHT, "flux2_dev_full", "parallel.gpus=2", "parallel.gpus: auto"),
        (EIGHT, "qwen_image_full", "parallel.shard=none", "parallel.shard: auto"),
        (EIGHT, "qwen_image_full", "parallel.gpus=1 parallel.shard=none", IN_ROWS),
        (EIGHT, "qwen_image_full", f"{STEPS}=1", f"{STEPS}: 2"),
        (EIGHT, "flux2_dev_full", f"{STEPS}=1", f"{STEPS}: 3"),
        (EIGHT, "qwen_image_full", f"{STEPS}=1 parallel.gpus=1", f"parallel.gpus: auto and {STEPS}: 2"),
        (TWO, "flux2_dev_lora", f"{SMALL} parallel.shard=none", "parallel.shard: auto"),
        (TWO, "flux2_dev_lora", f"{SMALL} {STEPS}=1", f"{STEPS}: 2"),
        ("cpu", "qwen3_lora", "parallel.gpus=2", "parallel.gpus: 1"),
    ],
)
def test_gpus_of_the_machine_are_named(computer: str, name: str, overrides: str, nearest: str) -> None:
    found = followed(name, computer, overrides)
    assert nearest in found
    # of what they say about GPUs and steps, one is enough
    assert [one for one in found if "parallel." in one or STEPS in one] == [nearest]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen_image_full", ""),
        ("flux2_dev_lora", "features.weights=fp8 features.block_swap=0 parallel.gpus=1"),
        ("flux2_dev_lora", f"features.weights=fp8 features.block_swap=0 {STEPS}=1"),
    ],
)
def test_gpus_that_help_not_are_not_named(name: str, overrides: str) -> None:
    found = followed(name, "several/rtx-4090-x2", overrides)
    assert found and not [one for one in found if "parallel." in one or STEPS in one]


@pytest.mark.parametrize(
    ("name", "overrides", "wanted"),
    [
        ("qwen_image_lora", "features.compute=fp8 features.block_swap=0", "features.compute: auto"),
        (
            "qwen_image_lora",
            "features.compute=fp8 features.modulation=kept features.block_swap=0",
            "features.compute: auto and features.modulation: auto",
        ),
        (
            "qwen_image_lora",
            f"{FP8} features.modulation=int8",
            "features.weights: nf4 and features.modulation: auto",
        ),
        (
            "qwen_image_lora",
            f"{FP8} features.compute=fp8",
            "features.weights: nf4 and features.compute: auto",
        ),
        ("llama_full", "train.optimizer=adamw_stochastic_bf16", "method: lora and train.optimizer: adamw"),
        ("llama_full", "features.compute=fp8", "method: lora"),
        (
            "llama_full",
            "features.compute=fp8 features.weights=bf16",
            "method: lora and features.compute: auto",
        ),
        (
            "llama_full",
            "features.compute=fp8 features.weight_gradient=bf16",
            "method: lora and features.weight_gradient: auto",
        ),
        (
            "flux1_dev_lora",
            f"{RECOMPUTING} features.weights=fp8 data.resolution=1536",
            "features.activation_checkpointing: true and features.activation_budget: auto",
        ),
    ],
)
def test_keys_that_stand_in_the_way_are_changed_too(name: str, overrides: str, wanted: str) -> None:
    assert wanted in followed(name, "rtx-4090", overrides)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ("model.dtype=fp32", "model.dtype: auto"),
        ("features.weights=fp32", "features.weights: auto"),
        ("model.dtype=fp32 features.weights=fp32", "model.dtype: auto and features.weights: auto"),
    ],
)
def test_bf16_is_named_where_fp32_does_not_fit(overrides: str, wanted: str) -> None:
    assert wanted in followed("flux1_dev_full", "h200", overrides)


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        # 23.5 GiB are needed, of which a desktop may have one
        ("features.compute=fp8 features.memory_budget=22.8GiB", []),
        ("features.weights=nf4 features.memory_budget=10GiB", ["features.memory_budget: "]),
    ],
)
def test_no_budget_is_more_than_auto_takes(overrides: str, most: list[str]) -> None:
    found = followed("qwen_image_lora", "rtx-4090", f"{overrides} features.block_swap=0")
    assert [one[:24] for one in found if "memory_budget" in one] == most
