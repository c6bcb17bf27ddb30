"""Full fine-tunes whose linears of one input compute together, every family, beside separate ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.contract.runs import FULL_CASES, SHORT_STEPS, Case, Job, Workshop, fewer, numbers
from tests.contract.test_full_in_fp8 import in_fp8
from tests.emulated_fp8 import emulated
from trainer.engine.building import build, fp8
from trainer.engine.building.build import load_base
from trainer.engine.optimizing.updater import Updater
from trainer.engine.records import checkpoint
from trainer.modeling.blocks.same_input import Group
from trainer.modeling.storage.joined_trained import JoinedFp8Linear, JoinedLinear

OPTIONS = (
    "model.dtype=bf16",
    "validation.prompts=[]",
    "validation.held_out=0",
    "train.max_grad_norm=1000000",
)


@pytest.mark.parametrize("compute", [pytest.param("bf16", marks=pytest.mark.slow), "fp8"])
@pytest.mark.parametrize("case", fewer(FULL_CASES), ids=str)
def test_joined_layers_learn_what_separate_ones_learn(
    case: Case, compute: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_Products", emulated)

    def trained(name: str) -> tuple[Job, dict[str, torch.Tensor]]:
        job = workshop.job(case, tmp_path / name, *OPTIONS)
        job = job if compute == "bf16" else in_fp8(job)
        job.train()
        folder = job.folder / "checkpoints" / f"step-{SHORT_STEPS:06d}"
        return job, checkpoint.read_group(folder, "weights", "cpu")

    together, found = trained("together")
    assert groups_told(together) > 0
    monkeypatch.setattr(build, "linears_of_one_input", lambda *_: [])
    apart, wanted = trained("apart")
    assert groups_told(apart) == 0
    assert list(found) == list(wanted) and saved(together) == saved(apart)
    untrained = workshop.job(case, tmp_path / "start", *OPTIONS)
    start = {name: one.detach() for name, one in load_base(untrained.context).module.named_parameters()}
    one, two = moved(found, start), moved(wanted, start)
    assert two.norm() > 0
    # sums of the inputs' gradients round otherwise, and AdamW's first steps go by signs
    assert torch.nn.functional.cosine_similarity(one, two, dim=0) > (0.98 if compute == "bf16" else 0.95)
    torch.testing.assert_close(losses(together), losses(apart), rtol=0.01, atol=0.0)


def groups_told(job: Job) -> int:
    """Groups that the run said its layers are joined in."""
    return sum(int(found) for found in re.findall(r"joined in (\d+) groups", "\n".join(job.said)))


def saved(job: Job) -> dict[str, Any]:
    """Names, types and shapes of the exported model's tensors."""
    found = {}
    for path in (job.folder / "model").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                found[name] = file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()
    return found


def moved(ended: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([(ended[name].double() - start[name].double()).flatten() for name in sorted(start)])


def losses(job: Job) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in numbers(job.folder) if "loss" in row])


@pytest.mark.parametrize("compute", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", ["adamw_split_bf16", "adamw_fused_fp32"])
def test_whatever_changes_weights_writes_where_products_read_them(
    compute: str,
    kind: str,
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps, the mean of the weights and back, a checkpoint that is loaded, checkpointing of activations."""
    monkeypatch.setattr(fp8, "_Products", emulated)
    job = workshop.job(FULL_CASES[0], tmp_path, *OPTIONS, "train.ema_decay=0.9")
    built = build.build((job if compute == "bf16" else in_fp8(job)).context)
    updater = Updater(built.updater.parameters, job.context.config.train, kind)
    updater.follow = built.updater.follow
    every = require_views(built.model)
    assert every > 4
    for parameter in updater.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    updater.accumulate()
    updater.step(1e-3, torch.zeros(()))
    assert require_views(built.model) == every
    with updater.averaged():
        assert require_views(built.model) == every
    assert require_views(built.model) == every
    weights, state = (
        {n: one.clone() for n, one in kept.items()} for kept in (updater.weights(), updater.state())
    )
    changed = {name: one * 2 for name, one in weights.items()}
    updater.load(changed, state, 1)
    assert require_views(built.model) == every
    assert all(torch.equal(updater.parameters[n].detach(), one.bfloat16()) for n, one in changed.items())


def require_views(model: torch.nn.Module) -> int:
    """Number of groups, each parameter of which is where the group's product reads it."""
    count = 0
    for first in model.modules():
        if isinstance(first, JoinedLinear | JoinedFp8Linear) and first.place == 0:
            count += 1
            require_group(first.shared, first.joint_weight, "weight")
            if first.joint_bias is not None:
                require_group(first.shared, first.joint_bias, "bias")
    return count


def require_group(shared: Group, whole: torch.Tensor, name: str) -> None:
    for member, part in zip(shared.members, whole.split(shared.sizes), strict=True):
        own = getattr(member, name)
        assert own.data_ptr() == part.data_ptr() and torch.equal(own.detach(), part)


def test_fp32_runs_keep_their_layers_apart(workshop: Workshop, tmp_path: Path) -> None:
    job = workshop.job(FULL_CASES[0], tmp_path, "model.dtype=fp32", *OPTIONS[1:])
    built = build.build(job.context)
    assert require_views(built.model) == 0 and groups_told(job) == 0
