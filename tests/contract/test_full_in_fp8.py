"""Full fine-tunes with products in FP8, every family: they learn what bf16 learns, and save what it saves.

A CPU emulates the products: they are computed in fp32 from the same quantised values.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.contract.runs import (
    FULL_CASES,
    SHORT_CHECKPOINT,
    SHORT_STEPS,
    Case,
    Job,
    Workshop,
    copy_until,
    different,
    fewer,
    files,
    numbers,
)
from tests.emulated_fp8 import emulated
from trainer.engine.building import fp8
from trainer.engine.building.build import build, load_base
from trainer.engine.records import checkpoint
from trainer.errors import HardwareError
from trainer.modeling.storage.fp8_trained import Fp8TrainedLinear
from trainer.modeling.storage.joined_trained import products_of
from trainer.planning.shapes.geometry import input_of

QUIET = ("validation.prompts=[]", "train.max_grad_norm=1000000")


def in_fp8(job: Job, gradient: str = "fp8") -> Job:
    """The job with the plan that a GPU with FP8 units has."""
    plan = dataclasses.replace(job.context.plan, compute="fp8", weight_copies=2, weight_gradient=gradient)
    return dataclasses.replace(job, context=dataclasses.replace(job.context, plan=plan))


def losses(job: Job, key: str = "loss") -> torch.Tensor:
    return torch.tensor([row[key] for row in numbers(job.folder) if key in row])


def trained(job: Job) -> dict[str, torch.Tensor]:
    job.train()
    folder = job.folder / "checkpoints" / f"step-{SHORT_STEPS:06d}"
    return checkpoint.read_group(folder, "weights", "cpu")


def moved(ended: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([(ended[name].double() - start[name].double()).flatten() for name in sorted(start)])


def saved(job: Job) -> dict[str, str]:
    """Names and types of the exported model's tensors."""
    found = {}
    for path in (job.folder / "model").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("case", fewer(FULL_CASES), ids=str)
def test_fp8_learns_what_bf16_learns_and_saves_what_it_saves(
    case: Case, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_Products", emulated)
    options = ("model.dtype=bf16", "validation.held_out=1", "validation.every_steps=1", *QUIET)
    plain = workshop.job(case, tmp_path / "bf16", *options)
    wanted = trained(plain)
    ours = in_fp8(workshop.job(case, tmp_path / "fp8", *options))
    found = trained(ours)
    said = "\n".join(ours.said)
    assert "products of one micro-batch ran in FP8, as counted" in said
    assert "gradients of weights in fp8" in said and "Proved: " in said
    assert found.keys() == wanted.keys()
    assert saved(ours) == saved(plain)
    assert "BF16" in saved(ours).values() and not any("F8" in kind for kind in saved(ours).values())
    untrained = workshop.job(case, tmp_path / "start", "model.dtype=bf16", *QUIET)
    start = {name: one.detach() for name, one in load_base(untrained.context).module.named_parameters()}
    one, two = moved(found, start), moved(wanted, start)
    assert not torch.equal(one, two), "FP8 rounds"
    assert torch.nn.functional.cosine_similarity(one, two, dim=0) > 0.9
    torch.testing.assert_close(losses(ours), losses(plain), rtol=0.02, atol=0.0)
    assert losses(ours).mean().item() == pytest.approx(losses(plain).mean().item(), rel=0.01)
    # held-out losses are of the weights as they are saved: before the first step, they are bf16's
    held = losses(ours, "validation_loss"), losses(plain, "validation_loss")
    assert held[0][0] == held[1][0]
    torch.testing.assert_close(*held, rtol=0.03, atol=0.0)


@pytest.mark.parametrize("case", FULL_CASES, ids=str)
def test_every_family_is_proved(
    case: Case, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose last block makes of the text what nothing reads."""
    monkeypatch.setattr(fp8, "_Products", emulated)
    job = in_fp8(workshop.job(case, tmp_path, "model.dtype=bf16", *QUIET))
    built = build(job.context)
    layers = sum(isinstance(one, Fp8TrainedLinear) for one in built.model.modules())
    groups = list(products_of(built.model))
    (said,) = [line for line in job.said if "as counted" in line]
    products = int(re.findall(r"(\d+) products", said)[0])
    unread = len(groups) * 3 - products
    together = [len(group) for group in groups if len(group) > 1]
    assert f"fp8: {layers} of " in said and layers == sum(map(len, groups))
    assert together and f"{sum(together)} layers" in said and f"in {len(together)} groups" in said
    assert unread == (6 if case.family.startswith("qwen_image") else 0), said
    assert all(parameter.grad is None for parameter in built.model.parameters())
    # the planner, which has names alone, counts the same inputs
    names = {id(module): name for name, module in built.model.named_modules()}
    inputs = [{input_of(names[id(layer)]) for layer in group} for group in groups]
    assert all(len(found) == 1 for found in inputs) and len(set.union(*inputs)) == len(groups)


@pytest.mark.parametrize("gradient", ["fp8", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", FULL_CASES[:1], ids=str)
def test_a_resumed_run_in_fp8_goes_on_to_the_bit(
    case: Case, gradient: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_Products", emulated)

    def job(name: str) -> Job:
        return in_fp8(workshop.job(case, tmp_path / name, "model.dtype=bf16", *QUIET), gradient)

    straight = job("straight")
    straight.train()
    assert f"gradients of weights in {gradient}" in "\n".join(straight.said)
    copy_until(straight, SHORT_CHECKPOINT, tmp_path / "resumed")
    rest = job("resumed")
    rest.train()
    assert any("resumed from" in line for line in rest.said)
    for written in ("model/**/*", "checkpoints/*/*.safetensors"):
        assert files(straight.folder, written)
        assert not different(files(rest.folder, written), files(straight.folder, written))


@pytest.mark.parametrize("case", FULL_CASES[:1], ids=str)
def test_products_that_do_not_run_in_fp8_end_the_run(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"layers are to have \d+ products in FP8, but only 0 ran"):
        in_fp8(workshop.job(case, tmp_path, "model.dtype=bf16", *QUIET)).train()
