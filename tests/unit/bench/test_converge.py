"""Verdicts on a run that is compared with its reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bench import converge, memory
from trainer.cli.options import Layers

REPOSITORY = Path(__file__).resolve().parents[3]


def run(losses: list[float], adapter: list[float], moments: list[float]) -> dict[str, Any]:
    return {
        "losses": losses,
        "adapter": {"a": torch.tensor(adapter)},
        "moments": {"a/exp_avg": torch.tensor(moments)},
        "proved": True,
    }


REFERENCE = run([4.0, 2.0, 1.0], [1.0, 0.0], [1.0, 1.0])


def test_a_run_is_what_it_is_compared_with() -> None:
    found = converge.compared(REFERENCE, REFERENCE)
    assert found["last_loss"] == pytest.approx(7.0 / 3, abs=1e-5)
    assert found["last_loss_ratio"] == found["adapter_cosine"] == 1.0
    assert found["gradient_cosine"] == pytest.approx(1.0)
    assert found["mean_apart"] == found["most_apart"] == 0.0
    assert (found["steps"], found["proved"]) == (3, True)


def test_differences_are_told() -> None:
    found = converge.compared(run([4.0, 2.2, 0.4], [0.0, 1.0], [1.0, 0.0]), REFERENCE)
    assert found["last_loss_ratio"] == pytest.approx(6.6 / 7.0, abs=1e-5)
    assert found["mean_apart"] == pytest.approx((0.0 + 0.1 + 0.6) / 3, abs=1e-6)
    assert found["most_apart"] == pytest.approx(0.6)
    assert found["adapter_cosine"] == 0.0
    assert found["gradient_cosine"] == pytest.approx(0.5**0.5, abs=1e-5)


def test_only_the_last_fifty_losses_are_averaged() -> None:
    reference = run([9.0] * 30 + [2.0] * 50, [1.0], [1.0])
    found = converge.compared(run([1.0] * 30 + [2.0] * 25 + [3.0] * 25, [1.0], [1.0]), reference)
    assert (found["last_loss"], found["last_loss_ratio"]) == (2.5, 1.25)
    assert found["first_loss_ratio"] == pytest.approx((30 + 20 * 2) / (30 * 9 + 20 * 2), abs=1e-5)
    assert found["steps"] == 80, "single losses are compared over the whole run"
    assert found["most_apart"] == pytest.approx(8 / 9, abs=1e-6)


def test_a_run_that_failed_has_its_reason_alone() -> None:
    assert converge.compared({"problem": "no kernel"}, REFERENCE) == {"problem": "no kernel"}


@pytest.mark.parametrize("settings", [converge.SETTINGS, memory.SETTINGS], ids=["converge", "memory"])
def test_every_setting_reaches_the_configuration(settings: Mapping[str, Sequence[str]]) -> None:
    for name, overrides in settings.items():
        config = (
            Layers((REPOSITORY / "train_configs" / "quickstart.yaml",), overrides).load().config.model_dump()
        )
        for override in overrides:
            key, _, value = override.partition("=")
            section, _, field = key.partition(".")
            assert config[section][field] == yaml.safe_load(value), f"{name}: {override}"


def test_settings_part_from_the_first_by_their_overrides() -> None:
    assert len({tuple(sorted(overrides)) for overrides in converge.SETTINGS.values()}) == len(
        converge.SETTINGS
    )
