"""Compiled blocks with joined layers: every family traces whole and learns what it learns eagerly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.runs import LORA_CASES, Case, Workshop, numbers
from trainer.modeling.compiled import graphs_compiled

_SHORT = ("validation.held_out=0", "validation.every_steps=2", "train.log_every_steps=1")
# tracing takes ten seconds and more a family
_CASES = [LORA_CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in LORA_CASES[1:])]


pytestmark = pytest.mark.usefixtures("traced")


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_compiled_losses_are_those_of_the_plain_run(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    """To 1e-4: sums are made in another order. A preview and the proof run in between and after."""
    compare(case, workshop, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_a_quantised_base_compiles_too(weights: str, workshop: Workshop, tmp_path: Path) -> None:
    compare(LORA_CASES[0], workshop, tmp_path, f"features.weights={weights}")


def compare(case: Case, workshop: Workshop, tmp_path: Path, *overrides: str) -> None:
    losses = {}
    for compiled in ("false", "true"):
        settings = (*_SHORT, f"features.compile={compiled}", "train.max_train_steps=3", *overrides)
        job = workshop.job(case, tmp_path / compiled, *settings)
        job.train()
        losses[compiled] = [row["loss"] for row in numbers(job.folder) if "loss" in row]
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-4)
    assert 0 < graphs_compiled() <= 16
    said = "\n".join(job.said)
    assert "LoRA layers share a product" in said
    assert "Proved: " in said
