"""Runs of a language model whose rows are padded: they learn, count and go on as runs whose rows are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.runs import (
    SHORT_CHECKPOINT,
    Case,
    Job,
    Workshop,
    copy_until,
    numbers,
    products,
)
from trainer.engine.training import loop
from trainer.engine.training.state import State, Work
from trainer.modeling.blocks.compiled import graphs_compiled

pytestmark = pytest.mark.usefixtures("traced")

COMPILED = ("features.compile=true", "train.log_every_steps=1", "validation.prompts=[]")
WAYS = {
    "LoRA": ("lora", ()),
    "full": ("full", ()),
    "recomputed": ("lora", ("features.activation_checkpointing=true",)),
    "two rows at once": ("lora", ("train.train_batch_size=2", "train.gradient_accumulation_steps=1")),
}


def losses(job: Job) -> list[float]:
    return [row["loss"] for row in numbers(job.folder) if "loss" in row]


def run_counted(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Train; give the tokens of each step, and the graphs that were there after it."""
    tokens: list[int] = []
    graphs: list[int] = []
    one_step = loop._one_step

    def step(run: Work, state: State, steps: loop.together.Steps) -> None:
        before = state.interval_tokens
        one_step(run, state, steps)
        tokens.append(state.interval_tokens - before)
        graphs.append(graphs_compiled())

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_one_step", step)
        job.train()
    return tokens, graphs


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_padded_rows_are_the_run_without_padding(
    way: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-4, as sums are made in another order. All packings share the graph of a block; in front of the
    first block nothing trains in a LoRA, which is a graph of its own.
    """
    method, settings = WAYS[way]
    case = Case(family="llama", method=method)
    plain = workshop.job(case, tmp_path / "plain", *COMPILED, *settings, "features.compile=false")
    padded = workshop.job(case, tmp_path / "padded", *COMPILED, *settings)
    assert padded.context.plan.text_padding and not plain.context.plan.text_padding
    tokens, none = run_counted(plain, monkeypatch)
    found, graphs = run_counted(padded, monkeypatch)
    assert found == tokens and len(set(tokens)) > 4
    assert not any(none) and set(graphs) == {1 if method == "full" else 2}
    assert losses(padded) == pytest.approx(losses(plain), rel=1e-4)
    kept = json.loads((padded.folder / "plan.json").read_text())
    assert kept["text_padding"]
    whole = 256 if way == "two rows at once" else 128
    assert f"rows are padded to {whole} tokens: " in "\n".join(padded.said)


@pytest.mark.slow
def test_a_resumed_run_is_the_run_without(workshop: Workshop, tmp_path: Path) -> None:
    case = Case(family="llama", method="lora")
    straight = workshop.job(case, tmp_path / "straight", *COMPILED)
    straight.train()
    copy_until(straight, SHORT_CHECKPOINT, tmp_path / "resumed")
    resumed = workshop.job(case, tmp_path / "resumed", *COMPILED)
    resumed.train()
    assert f"resumed from step-{SHORT_CHECKPOINT:06d}" in "\n".join(resumed.said)
    assert numbers(resumed.folder) == numbers(straight.folder)
    assert products(resumed.folder) == products(straight.folder)
