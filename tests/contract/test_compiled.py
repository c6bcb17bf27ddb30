"""Compiled blocks with joined layers, on a set of real shape: every family traces whole, in graphs of any
size of what varies, and learns what it learns eagerly.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.contract.real_shaped import settings
from tests.contract.runs import ALIKE, LORA_CASES, Case, Workshop, draws, numbers, without
from tests.reached import reach_in_runs
from trainer import families
from trainer.engine.training import loop
from trainer.modeling.blocks.compiled import graphs_compiled

# tracing takes ten seconds and more a family; Kontext's blocks are FLUX.1's
_CASES = without(LORA_CASES, ALIKE, ["flux1_kontext"])
# families whose first blocks share the graph of the others here; those of the rest have graphs of their own
REACHED = ("kandinsky5", "qwen3")
pytestmark = pytest.mark.usefixtures("traced", "small_kontexts")


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_compiled_losses_are_those_of_the_plain_run(
    case: Case, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-4: sums are made in another order. A preview and the proof run in between and after."""
    if case.family in REACHED:
        reach_in_runs(monkeypatch)
    counts = compare(case, workshop, tmp_path, monkeypatch)
    assert len(counts) == 6 and set(counts) == {counts[0]}
    assert case.family not in REACHED or counts[0] == len(families.get(case.family).blocks)


@pytest.mark.slow
@pytest.mark.parametrize("case", [one for one in LORA_CASES if one.family == "qwen_image"], ids=str)
def test_batches_of_all_sizes_share_graphs(
    case: Case, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of one is apart: a compiler takes its size for a constant."""
    batch = ("train.train_batch_size=4", "train.gradient_accumulation_steps=1")
    counts = compare(case, workshop, tmp_path, monkeypatch, *batch, "train.max_train_steps=6")
    assert len(counts) > 6 and len(set(counts)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_a_quantised_base_compiles_too(
    weights: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach_in_runs(monkeypatch)
    compare(
        Case(family="qwen_image", method="lora"),
        workshop,
        tmp_path,
        monkeypatch,
        f"features.weights={weights}",
    )


def compare(
    case: Case, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> list[int]:
    """Losses beside those of the plain run; graphs that were there after each micro-batch."""
    losses = {}
    counts: list[int] = []
    sizes: set[Any] = set()
    compute = loop.compute

    def counted(*arguments: Any) -> Any:
        loss = compute(*arguments)
        counts.append(graphs_compiled())
        sizes.update(one.shape[2:] for one in arguments[2].latents.values())
        return loss

    monkeypatch.setattr(loop, "compute", counted)
    previews = ("validation.prompts=[a hill]",) if case.family == LORA_CASES[0].family else ()
    for compiled in ("false", "true"):
        counts.clear()
        values = (f"features.compile={compiled}", "train.max_train_steps=3", *previews, *overrides)
        job = workshop.job(
            case, tmp_path / compiled, *settings(case.family), "validation.every_steps=2", *values
        )
        job.train()
        losses[compiled] = [row["loss"] for row in numbers(job.folder) if "loss" in row]
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-4)
    assert 0 < graphs_compiled() <= 16
    if draws(case.family):
        assert len(sizes) > 2, "pictures of other sizes"
    said = "\n".join(job.said)
    assert draws(case.family) or re.search(r"rows are padded to \d[\d ]* tokens: \d+\.\d% of them", said)
    assert "LoRA layers share a product" in said
    assert "Proved: " in said
    return counts
