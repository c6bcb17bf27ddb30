"""Full fine-tunes in bf16, every family: they learn what their fp32 twin learns by torch's own AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.contract.runs import (
    CHECKPOINT_STEP,
    FULL_CASES,
    STEPS,
    Case,
    Job,
    Workshop,
    different,
    fewer,
    files,
    numbers,
)
from trainer.engine.building.build import load_base
from trainer.engine.optimizing.split_adamw import joined
from trainer.engine.records import checkpoint
from trainer.errors import ConfigError
from trainer.planning.choose import optimizers

QUIET = ("validation.prompts=[]", "validation.held_out=0", "train.max_grad_norm=1000000")


def trained(workshop: Workshop, case: Case, folder: Path, dtype: str) -> tuple[Job, dict[str, torch.Tensor]]:
    """A run in this type, and its masters in fp32 by name."""
    job = workshop.job(case, folder, f"model.dtype={dtype}", *QUIET)
    job.train()
    return job, masters(job)


def masters(job: Job) -> dict[str, torch.Tensor]:
    saved = job.folder / "checkpoints" / f"step-{STEPS:06d}"
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


@pytest.mark.parametrize("case", FULL_CASES[:1], ids=str)
def test_a_full_fine_tune_in_bf16_goes_on_to_the_bit(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    narrow = ("model.dtype=bf16", "validation.prompts=[]")
    whole = workshop.job(case, tmp_path / "whole", *narrow)
    whole.train()
    workshop.job(case, tmp_path / "halves", *narrow, f"train.max_train_steps={CHECKPOINT_STEP}").train()
    rest = workshop.job(case, tmp_path / "halves", *narrow)
    rest.train()
    assert any("resumed from" in line for line in rest.said)
    for written in ("model/*", "checkpoints/*10/*.safetensors"):
        assert files(whole.folder, written)
        assert not different(files(rest.folder, written), files(whole.folder, written))


@pytest.mark.parametrize("case", FULL_CASES[:1], ids=str)
def test_a_run_with_compensated_sums_goes_on_with_split_masters_and_not_back(
    case: Case, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("model.dtype=bf16", *QUIET)
    with monkeypatch.context() as before:
        before.setattr(optimizers, "kahan", optimizers.trains_in_bf16)
        first = workshop.job(case, tmp_path, *options, f"train.max_train_steps={CHECKPOINT_STEP}")
        assert first.context.plan.optimizer == "adamw_kahan_bf16"
        first.train()
    second = workshop.job(case, tmp_path, *options)
    second.train()
    said = "\n".join(second.said)
    assert "optimizer: adamw_split_bf16 from here on, adamw_kahan_bf16 before" in said
    assert "train.adam_beta2: 0.999 from here on, 0.99 before" in said
    # it learns on as a run that had exact masters from the beginning
    never, theirs = trained(workshop, case, tmp_path / "never", "bf16")
    start = {name: one.float() for name, one in checkpoint.read_group(
        first.folder / "checkpoints" / f"step-{CHECKPOINT_STEP:06d}", "weights", "cpu").items()}  # fmt: skip
    ours = moved(masters(second), start)
    assert torch.nn.functional.cosine_similarity(ours, moved(theirs, start), dim=0) > 0.99
    torch.testing.assert_close(losses(second)[-2:], losses(never)[-2:], rtol=0.005, atol=0.0)
    monkeypatch.setattr(optimizers, "kahan", optimizers.trains_in_bf16)
    with pytest.raises(ConfigError, match="the checkpoint has 'adamw_split_bf16'"):
        workshop.job(case, tmp_path, *options, "train.max_train_steps=12").train()
