"""Full fine-tunes in bf16, every family: they learn what their fp32 twin learns by torch's own AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optimi
import pytest
import torch

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
from trainer.config.schema import TrainSection
from trainer.engine.building.build import load_base
from trainer.engine.optimizing import optimizers
from trainer.engine.optimizing.split_adamw import joined
from trainer.engine.records import checkpoint

QUIET = ("validation.prompts=[]", "validation.held_out=0", "train.max_grad_norm=1000000")


def trained(workshop: Workshop, case: Case, folder: Path, dtype: str) -> tuple[Job, dict[str, torch.Tensor]]:
    """A run in this type, and its masters in fp32 by name."""
    job = workshop.job(case, folder, f"model.dtype={dtype}", *QUIET)
    job.train()
    return job, masters(job)


def masters(job: Job) -> dict[str, torch.Tensor]:
    saved = job.folder / "checkpoints" / f"step-{SHORT_STEPS:06d}"
    weights = checkpoint.read_group(saved, "weights", "cpu")
    state = checkpoint.read_group(saved, "optimizer", "cpu")
    return {
        name: weight.float() if (low := state.get(f"{name}/low")) is None else joined(weight, low)
        for name, weight in weights.items()
    }


def moved(ended: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([(ended[name] - start[name]).flatten().double() for name in sorted(start)])


def losses(job: Job) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in numbers(job.folder) if "loss" in row])


@pytest.mark.parametrize("case", fewer(FULL_CASES), ids=str)
def test_a_full_fine_tune_in_bf16_learns_what_its_fp32_twin_learns(
    case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    narrow, ours = trained(workshop, case, tmp_path / "bf16", "bf16")
    wide, theirs = trained(workshop, case, tmp_path / "fp32", "fp32")
    assert narrow.context.plan.optimizer == "adamw_split_bf16"
    assert wide.context.plan.optimizer == "adamw_fused_fp32"
    assert ours.keys() == theirs.keys()
    untrained = workshop.job(case, tmp_path / "start", "model.dtype=fp32", *QUIET)
    module = load_base(untrained.context).module
    start = {name: one.detach() for name, one in module.named_parameters()}
    one, two = moved(ours, start), moved(theirs, start)
    assert two.norm() > 0
    # the model computes in bf16, and each begins with weights rounded to its type
    assert torch.nn.functional.cosine_similarity(one, two, dim=0) > 0.98
    assert one.norm() / two.norm() == pytest.approx(1.0, abs=0.01)
    torch.testing.assert_close(losses(narrow), losses(wide), rtol=0.01, atol=0.0)


@pytest.mark.parametrize(
    "optimizer", ["adamw", pytest.param("adamw_stochastic_bf16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", FULL_CASES[:1], ids=str)
def test_a_full_fine_tune_in_bf16_goes_on_to_the_bit(
    case: Case, optimizer: str, workshop: Workshop, tmp_path: Path
) -> None:
    narrow = ("model.dtype=bf16", "validation.prompts=[]", f"train.optimizer={optimizer}")
    whole = workshop.job(case, tmp_path / "whole", *narrow)
    whole.train()
    copy_until(whole, SHORT_CHECKPOINT, tmp_path / "halves")
    rest = workshop.job(case, tmp_path / "halves", *narrow)
    rest.train()
    assert any("resumed from" in line for line in rest.said)
    for written in ("model/**/*", f"checkpoints/*{SHORT_STEPS}/*.safetensors"):
        assert files(whole.folder, written)
        assert not different(files(rest.folder, written), files(whole.folder, written))


@pytest.mark.parametrize("case", FULL_CASES[:1], ids=str)
def test_a_run_with_compensated_sums_goes_on_with_split_masters(
    case: Case, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("model.dtype=bf16", *QUIET, "train.log_every_steps=1")
    with monkeypatch.context() as before:
        before.setattr(optimizers, "build_split", compensated)
        first = workshop.job(case, tmp_path, *options, f"train.max_train_steps={SHORT_CHECKPOINT}")
        first.train()
    start = written_as_before(first.folder / "checkpoints")
    second = workshop.job(case, tmp_path, *options)
    second.train()
    said = "\n".join(second.said)
    assert "optimizer: adamw_split_bf16 from here on, adamw_kahan_bf16 before" in said
    assert "train.adam_beta2: 0.999 from here on, 0.99 before" in said
    assert "train.weight_decay: 0.01 from here on, 0.0 before" in said
    # it learns on as a run that had exact masters from the beginning
    never = workshop.job(case, tmp_path / "never", *options)
    never.train()
    ours, theirs = (moved(masters(job), start) for job in (second, never))
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.99
    torch.testing.assert_close(losses(second)[-2:], losses(never)[-2:], rtol=0.005, atol=0.0)
    third = workshop.job(case, tmp_path, *options, "train.max_train_steps=7")
    third.train()
    said = "\n".join(third.said)
    assert "resumed from" in said and "optimizer" not in said  # its own checkpoint has split masters


def compensated(
    kind: str,
    parameters: Mapping[str, torch.nn.Parameter],
    train: TrainSection,
    first_values: Mapping[str, int],
) -> torch.optim.Optimizer:
    """optimi's AdamW as earlier versions trained with it, in the place of ours: the updater saves its state
    as they did, a tensor a key.
    """
    settings: dict[str, Any] = {
        "betas": (train.adam_beta1, 0.99),
        "weight_decay": 0.0,
        "eps": train.adam_epsilon,
    }
    values = list(parameters.values())
    return optimi.AdamW(values, train.learning_rate, kahan_sum=True, triton=False, foreach=False, **settings)


def written_as_before(checkpoints: Path) -> dict[str, torch.Tensor]:
    """Give the checkpoint of optimi's run the records that such a run had; returns its weights in fp32."""
    (folder,) = checkpoint.steps_on_disk(checkpoints)
    weights, state = (checkpoint.read_group(folder, group, "cpu") for group in ("weights", "optimizer"))
    kinds = {name.rpartition("/")[2] for name in state}
    assert kinds == {"exp_avg", "exp_avg_sq", "kahan_comp"}
    snapshot = checkpoint.read_snapshot(folder)
    old = dataclasses.replace(
        snapshot,
        fingerprint={**snapshot.fingerprint, "optimizer": "adamw_kahan_bf16"},
        settings={**snapshot.settings, "train.adam_beta2": "0.99", "train.weight_decay": "0.0"},
    )
    size = sum(one.nbytes for one in weights.values())
    checkpoint.save(checkpoints, old, weights, state, least_bytes=size, keep=1, on_tensor=lambda: None)
    return {name: one.float() for name, one in weights.items()}
