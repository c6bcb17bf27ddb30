"""A run whose blocks wait in host memory is the run without, bit for bit: losses, resume, files, proof."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contract.conftest import Finished
from tests.contract.runs import (
    LORA_CASES,
    SHORT_CHECKPOINT,
    Case,
    Job,
    KilledError,
    Workshop,
    dying_after,
    numbers,
    products,
)
from tests.reached import reach_in_runs
from trainer.engine.building.build import load_base
from trainer.modeling.base import structure
from trainer.modeling.base.base import local_folder
from trainer.modeling.blocks.compiled import graphs_compiled
from trainer.modeling.blocks.recompute import repeated_blocks
from trainer.modeling.storage.host_blocks import spread, spread_blocks
from trainer.planning.shapes.run_shapes import run_geometry

_CASES = [
    pytest.param(case, marks=() if case.family == "flux1_dev" else pytest.mark.slow) for case in LORA_CASES
]


def swapping(job: Job, count: int) -> Job:
    """The run with `count` waiting blocks: no user's run on a CPU, whose memory is the host's."""
    plan = dataclasses.replace(job.context.plan, swapped_blocks=count, activation_checkpointing=True)
    return dataclasses.replace(job, context=dataclasses.replace(job.context, plan=plan))


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_a_killed_and_resumed_run_is_the_run_without(
    case: Case, workshop: Workshop, finished: Callable[[Case], Finished], tmp_path: Path
) -> None:
    """With previews, a held-out loss, and the proof at its end."""
    straight = finished(case)
    with pytest.raises(KilledError):
        dying = workshop.job(case, tmp_path, status=dying_after(tmp_path, SHORT_CHECKPOINT + 2))
        swapping(dying, 2).train()
    job = swapping(workshop.job(case, tmp_path), 2)
    job.train()
    said = "\n".join(job.said)
    assert "2 blocks wait in host memory" in said
    assert f"resumed from step-{SHORT_CHECKPOINT:06d}" in said
    assert "Proved: " in said
    assert numbers(job.folder) == numbers(straight.folder)
    assert products(job.folder) == products(straight.folder)


@pytest.mark.parametrize("source", ["pretrained", "random"])
@pytest.mark.parametrize("weights", ["fp32", "int8", "nf4", "fp8"])
def test_a_base_waits_as_it_was_loaded(weights: str, source: str, workshop: Workshop, tmp_path: Path) -> None:
    case = Case(family="flux1_dev", method="lora")
    models = []
    for count in (0, 3):
        settings = (f"features.weights={weights}", f"model.weights={source}")
        job = workshop.job(case, tmp_path / str(count), *settings)
        models.append(load_base(swapping(job, count).context))
    staged = models[1].staged
    assert staged is not None and len(staged.blocks) == 3
    staged.unpack()
    here, there = (model.module.state_dict() for model in models)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize(
    "options", [(), ("features.weights=nf4",), ("features.weights=int8", "model.weights=random")]
)
def test_what_waits_goes_to_the_host_as_soon_as_it_is_complete(
    options: tuple[str, ...], workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the rest of the model is loaded, and never back to the device."""
    moved: list[tuple[str, torch.nn.Module]] = []
    plain = structure.move

    def told(module: torch.nn.Module, device: str) -> None:
        moved.append(("host" if sys._getframe(1).f_code.co_name == "place" else "device", module))
        plain(module, device)

    monkeypatch.setattr(structure, "move", told)
    model = load_base(
        swapping(workshop.job(Case(family="flux1_dev", method="lora"), tmp_path, *options), 3).context
    )
    staged = model.staged
    assert staged is not None
    inside = {
        module for block in staged.blocks for module in block.modules() if [*module.parameters(recurse=False)]
    }
    to_host = [module for where, module in moved if where == "host"]
    assert inside <= set(to_host)
    assert inside.isdisjoint(module for where, module in moved if where == "device")


@pytest.mark.parametrize("case", LORA_CASES, ids=str)
def test_the_plan_counts_the_blocks_that_wait(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    """The plan counts the blocks that wait, with the same number of parameters."""
    job = workshop.job(case, tmp_path)
    context = job.context
    geometry = run_geometry(
        context.family, context.config, model_folder=local_folder(context.config), dtype="fp32"
    )
    model = load_base(context).module
    blocks = sum(stack.blocks for stack in geometry.stacks)
    for count in range(1, blocks + 1):
        chosen = spread([stack.blocks for stack in geometry.stacks], count)
        planned = {
            f"{stack.name}.{place}"
            for stack, places in zip(geometry.stacks, chosen, strict=True)
            for place in places
        }
        assert set(spread_blocks(repeated_blocks(model, context.family.blocks), count)) == planned
    for stack in geometry.stacks:
        block = model.get_submodule(f"{stack.name}.0")
        assert sum(p.numel() for p in block.parameters()) == stack.quantized.parameters + stack.others


@pytest.mark.usefixtures("traced")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux1_dev", "llama"])
def test_compiled_blocks_wait_too(
    family: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-4, as joined layers sum in another order. What is around a block is not compiled."""
    reach_in_runs(monkeypatch)
    case = Case(family=family, method="lora")
    settings = ("validation.every_steps=2", "train.max_train_steps=3", "train.log_every_steps=1")
    losses = {}
    for compiled in ("false", "true"):
        job = workshop.job(case, tmp_path / compiled, *settings, f"features.compile={compiled}")
        if compiled == "true":
            job = swapping(job, 2)
        job.train()
        losses[compiled] = [row["loss"] for row in numbers(job.folder) if "loss" in row]
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-4)
    assert 0 < graphs_compiled() <= 16
    said = "\n".join(job.said)
    assert "LoRA layers share a product" in said and "2 blocks wait in host memory" in said
