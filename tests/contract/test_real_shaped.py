"""Every family on a set of real shape: captions of 1 to 300 tokens, six aspect ratios, controls of other
sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.contract import runs
from tests.contract.real_shaped import CHECKPOINT_STEP, STEPS, few, settings
from tests.contract.runs import (
    ALIKE,
    LORA_CASES,
    Case,
    Job,
    Step,
    Workshop,
    copy_until,
    different,
    draws,
    files,
    numbers,
    products,
    record_samples,
    require_near,
    without,
)
from tests.tiny import TINY_MODELS
from trainer.config.schema import RunConfig
from trainer.engine.building import build
from trainer.engine.caching.samples import Samples, scan_samples
from trainer.engine.context import Context
from trainer.families.family import Family
from trainer.modeling.storage.row_scaled import RowScaledLinear

ALWAYS = ("qwen_image",)
"""Families that every run tests: captions are not padded, and nearly each has a length of its own."""
STORAGES: dict[str, tuple[str, ...]] = {
    "lora": (),
    "full": (),
    "int8": ("features.weights=int8",),
    "nf4": ("features.weights=nf4",),
    "fp8": ("features.weights=fp8",),
}


pytestmark = pytest.mark.usefixtures("small_kontexts")

Spread = Callable[[str], str]
"""Gives the `--set` value of a family's samples."""


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Spread:
    return functools.cache(lambda family: few(family, tmp_path_factory.mktemp("few") / family))


@pytest.fixture(scope="module")
def scans() -> dict[tuple[str, str], Samples]:
    return {}


@pytest.fixture(autouse=True)
def scanned_once(scans: dict[tuple[str, str], Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pictures are decoded once a family, not once a run."""
    scan = scan_samples

    def once(family: Family, config: RunConfig) -> Samples:
        key = family.name, repr(config.data.sets)
        if key not in scans:
            scans[key] = scan(family, config)
        return scans[key]

    monkeypatch.setattr(runs, "scan_samples", once)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.family in ALWAYS else pytest.mark.slow, id=str(case))
        for case in without(LORA_CASES, ALIKE)
    ],
)
def test_four_at_once_learn_what_four_after_another_learn(
    case: Case, spread: Spread, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = record_samples(monkeypatch)
    seen: list[list[Step]] = []
    losses, weights = [], []
    for batch_size, accumulation in ((4, 1), (1, 4)):
        shape = (
            f"train.train_batch_size={batch_size}",
            f"train.gradient_accumulation_steps={accumulation}",
            "train.learning_rate=1e-4",
        )
        folder = tmp_path / f"{batch_size}x{accumulation}"
        job = workshop.job(case, folder, *settings(case.family), spread(case.family), *shape)
        job.train()
        seen.append(list(taken))
        taken.clear()
        losses.append([row["loss"] for row in numbers(job.folder) if row["step"]])
        folder = job.folder / "checkpoints" / f"step-{STEPS:06d}"
        weights.append(load_file(next(folder.glob("weights-*"))))
    together, alone = ([{one for part in step for one in part} for step in one] for one in seen)
    assert together == alone
    assert all(math.isfinite(loss) for loss in losses[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    require_near(*weights, rate=1e-4)
    if draws(case.family):
        assert all(len({one.record for one in step}) == 4 for step in together)
        # shapes differ in a step, so that there are more micro-batches, and smaller ones
        assert max(map(len, seen[0])) > 1
        assert all(len(step) == 4 for step in seen[1])


def count_fp8_layers(context: Context, model: torch.nn.Module) -> str:
    """Stands for the proof that a GPU's FP8 products ran: a CPU's are emulated."""
    layers = [one for one in model.modules() if isinstance(one, RowScaledLinear) and one.fp8_compute]
    assert layers
    return f"{len(layers)} layers emulate FP8"


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", TINY_MODELS)
def test_a_resumed_run_is_the_run_without(
    family: str,
    storage: str,
    spread: Spread,
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "prove_fp8", count_fp8_layers)
    case = Case(family=family, method="full" if storage == "full" else "lora")

    def job(name: str) -> Job:
        shape = ("train.train_batch_size=2", "train.gradient_accumulation_steps=1", "validation.held_out=1")
        chosen = (*settings(family), spread(family), *shape, *STORAGES[storage])
        made = workshop.job(case, tmp_path / name, *chosen)
        if storage != "fp8":
            return made
        # a CPU's plan unpacks FP8 weights; their products are those that it emulates
        plan = dataclasses.replace(made.context.plan, compute="fp8")
        return dataclasses.replace(made, context=dataclasses.replace(made.context, plan=plan))

    straight = job("straight")
    assert straight.context.plan.weights == (storage if STORAGES[storage] else "fp32")
    straight.train()
    copy_until(straight, CHECKPOINT_STEP, tmp_path / "resumed")
    resumed = job("resumed")
    resumed.train()
    assert f"resumed from step-{CHECKPOINT_STEP:06d}" in resumed.said
    said = "\n".join(resumed.said)
    assert "Proved: " in said
    assert ("layers emulate FP8" in said) == (storage == "fp8")
    assert numbers(resumed.folder) == numbers(straight.folder)
    assert products(resumed.folder)
    assert not different(products(resumed.folder), products(straight.folder))
    kept = "checkpoints/*/*"
    assert not different(files(resumed.folder, kept), files(straight.folder, kept))
