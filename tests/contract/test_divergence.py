"""A value that is not finite ends the run before it can spoil anything."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.conftest import Finished
from tests.contract.runs import (
    FULL_CASES,
    LORA_CASES,
    Case,
    Step,
    Workshop,
    fewer,
    mostly_slow,
    numbers,
    steps_saved,
)
from trainer.engine import run
from trainer.engine.building.build import Built, build
from trainer.engine.caching.entries import Entries, list_entries
from trainer.engine.records import checkpoint
from trainer.errors import DivergedError, ExitCode

ACCUMULATION = 2


def poison(entries: Entries, record: int) -> None:
    """Put NaN into what is cached of one sample, with a checksum that is right."""
    entry = (entries.latents or entries.texts)[record]
    tensors = entries.cache.read(entry.kind, entry.key)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.view(-1)[-1] = float("nan")
    entries.cache.write(entry.kind, entry.key, tensors)


def late_record(steps: list[Step]) -> tuple[int, int]:
    """(record, step) of the record that the run meets for the first time as late as possible."""
    first: dict[int, int] = {}
    for number, step in enumerate(steps, 1):
        for sample in (one for micro_batch in step for one in micro_batch):
            first.setdefault(sample.record, number)
    return max(first.items(), key=lambda item: item[1])


@pytest.mark.parametrize("case", [*mostly_slow(LORA_CASES), *fewer(FULL_CASES)], ids=str)
def test_nan_in_one_picture_is_named_and_changes_nothing(
    case: Case,
    workshop: Workshop,
    finished: Callable[[Case], Finished],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, step = late_record(finished(case).samples)
    assert step > 1
    cache = Path(shutil.copytree(workshop.cache, tmp_path / "cache"))
    options = ("checkpoint.checkpointing_steps=1", "train.log_every_steps=1", "validation.prompts=[]")
    job = workshop.job(case, tmp_path, *options, cache=cache)
    training = job.samples.training
    poison(list_entries(job.context, training, job.samples.prompt_controls), record)
    built: list[Built] = []

    def keep(*arguments: Any) -> Built:
        built.append(build(*arguments))
        return built[0]

    monkeypatch.setattr(run, "build", keep)
    with pytest.raises(DivergedError) as caught:
        job.train()
    assert caught.value.exit_code is ExitCode.DIVERGED
    assert str(training[record].path) in caught.value.problems[0].where
    assert f"step {step}: " in str(caught.value)
    assert f"the checkpoint of step {step - 1} is intact" in str(caught.value)
    last = f"step-{step - 1:06d}"
    assert steps_saved(job.folder)[-1] == last
    saved = checkpoint.read_group(job.folder / "checkpoints" / last, "weights", "cpu")
    now = built[0].updater.weights()
    assert now.keys() == saved.keys()
    assert all(torch.equal(now[name], saved[name]) for name in saved)
    assert not (job.folder / "lora").exists()
    assert not (job.folder / "model").exists()
    rows = numbers(job.folder)
    assert [row["step"] for row in rows] == list(range(step))
    assert all(math.isfinite(row["loss"]) for row in rows[1:])


@pytest.mark.parametrize("case", fewer(LORA_CASES), ids=str)
def test_a_run_that_diverged_goes_on_when_the_picture_is_repaired(
    case: Case, workshop: Workshop, finished: Callable[[Case], Finished], tmp_path: Path
) -> None:
    record, _ = late_record(finished(case).samples)
    cache = Path(shutil.copytree(workshop.cache, tmp_path / "cache"))
    job = workshop.job(case, tmp_path, cache=cache)
    entries = list_entries(job.context, job.samples.training, job.samples.prompt_controls)
    poison(entries, record)
    with pytest.raises(DivergedError):
        job.train()
    shutil.rmtree(cache)
    workshop.job(case, tmp_path, cache=cache).train()
    assert numbers(job.folder) == numbers(finished(case).folder)
