"""What is said of a run beside its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scripts.benches import converge


def run(losses: list[float], adapter: list[float], moments: list[float]) -> dict[str, Any]:
    return {
        "losses": losses,
        "adapter": {"a": torch.tensor(adapter)},
        "moments": {"a/exp_avg": torch.tensor(moments)},
        "proved": True,
    }


REFERENCE = run([4.0, 2.0, 1.0], [1.0, 0.0], [1.0, 1.0])


def test_a_run_is_what_it_is_compared_with() -> None:
    found = converge._compared(REFERENCE, REFERENCE)
    assert found["last_loss_ratio"] == found["adapter_cosine"] == 1.0
    assert found["gradient_cosine"] == pytest.approx(1.0)
    assert found["mean_apart"] == found["most_apart"] == 0.0


def test_differences_are_told() -> None:
    found = converge._compared(run([4.0, 2.2, 0.8], [0.0, 1.0], [1.0, 0.0]), REFERENCE)
    assert found["last_loss_ratio"] == pytest.approx(7.0 / 7.0)
    assert found["mean_apart"] == pytest.approx((0.1 + 0.2) / 3)
    assert found["most_apart"] == pytest.approx(0.2)
    assert found["adapter_cosine"] == 0.0
    assert found["gradient_cosine"] == pytest.approx(0.5**0.5, abs=1e-5)


def test_a_run_that_failed_has_its_reason_alone() -> None:
    assert converge._compared({"problem": "no kernel"}, REFERENCE) == {"problem": "no kernel"}


def test_every_setting_is_one_of_the_configuration() -> None:
    from pathlib import Path

    from trainer.cli.options import load_config

    for overrides in converge.SETTINGS.values():
        loaded = load_config((Path("train_configs/quickstart.yaml"),), overrides)
        assert loaded.config.family
