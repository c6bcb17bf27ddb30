"""Full fine-tunes whose weights lie in rows with two ranks: stopped, killed and failing, as a LoRA's."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.runs import FULL_CASES, STEPS, Workshop, numbers, steps_saved
from tests.contract.test_divergence import late_record, poison
from tests.contract.test_resumes import flip
from tests.e2e.conftest import Process, Start
from tests.e2e.test_ranks import TWO, ended, pids, require_gone_after_kill
from tests.ranks import is_gone
from trainer.engine.caching.entries import list_entries
from trainer.engine.training.feed import make_sampler
from trainer.errors import ExitCode
from trainer.telemetry.status import Phase

FULL = FULL_CASES[0]
SURE = "train.adam_epsilon=1e-5"
"""AdamW moves a weight whose gradient is all but zero by its sign, which sums in another order may turn."""


def require_as_one(process: Process, straight: Process) -> None:
    """AssertionError where a run has learned something else than one process did."""
    ours, theirs = numbers(process.run_dir), numbers(straight.run_dir)
    assert [sorted(row) for row in ours] == [sorted(row) for row in theirs]
    losses = [torch.tensor([value for row in rows for value in row.values()]) for rows in (ours, theirs)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0.0)
    name = "model/transformer/diffusion_pytorch_model.safetensors"
    one, other = (load_file(run.run_dir / name) for run in (process, straight))
    assert one.keys() == other.keys()
    assert max((one[key] - other[key]).abs().max().item() for key in one) < 1e-6


@pytest.fixture
def straight(start: Start, tmp_path: Path) -> Process:
    """The run by one process."""
    process = start(FULL, tmp_path / "straight", SURE)
    ended(process)
    return process


@pytest.mark.slow
def test_stopped_by_two_and_gone_on_with_by_one_and_by_two(
    start: Start, straight: Process, tmp_path: Path
) -> None:
    """One rank alone is told to end, in the first steps; all save one checkpoint, which knows of no rank."""
    late, slow = "checkpoint.checkpointing_steps=1000", {"patch": "rank"}
    process = start(FULL, tmp_path, TWO, SURE, late, knobs=slow)
    children = pids(process, 2)
    os.kill(children[1], signal.SIGTERM)
    code, errors = process.end()
    assert code == ExitCode.STOPPED, errors
    assert errors.count("stopped on request") == 1
    assert "another rank" not in errors and "Traceback" not in errors
    assert all(is_gone(pid) for pid in children)
    (saved,) = steps_saved(process.run_dir)
    process = start(FULL, tmp_path, SURE)
    process.wait_until((process.run_dir / "checkpoints" / "step-000005").is_dir)
    os.kill(process.child(), signal.SIGKILL)
    _, errors = process.end()
    assert f"resumed from {saved}" in errors
    process = start(FULL, tmp_path, TWO, SURE)
    printed = " ".join(ended(process).split())
    assert "resumed from step-000005" in printed
    assert printed.count("Proved: ") == 1 and "rows over 2" in printed
    require_as_one(process, straight)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_within_seconds(rank: int, start: Start, tmp_path: Path) -> None:
    """The other one waits in the middle of a pass through the model."""
    process = start(FULL, tmp_path, TWO, "train.max_train_steps=10000")
    children = pids(process, 2)
    process.wait_until((process.run_dir / "checkpoints" / "step-000005").is_dir)
    require_gone_after_kill(process, children, rank)


@pytest.mark.slow
def test_a_stop_in_previews_is_told_once(start: Start, tmp_path: Path) -> None:
    process = start(FULL, tmp_path, TWO, "checkpoint.checkpointing_steps=1", knobs={"patch": "preview"})
    process.wait_until(lambda: steps_saved(process.run_dir) != [])
    process.wait_for_phase(Phase.PREVIEW)
    process.popen.send_signal(signal.SIGTERM)
    code, errors = process.end()
    assert code == ExitCode.STOPPED, errors
    assert errors.count("stopped on request") == 1
    assert "rank 1" not in errors and "Traceback" not in errors


@pytest.mark.slow
def test_nan_on_one_rank_is_named_and_changes_nothing(
    start: Start, yard: Workshop, straight: Process, tmp_path: Path
) -> None:
    job = yard.job(FULL, tmp_path / "here", "validation.prompts=[]")
    cache = Path(shutil.copytree(straight.cache, tmp_path / "cache"))
    entries = list_entries(job.context, job.samples.training, job.samples.prompt_controls)
    sampler = make_sampler(job.context, entries)
    record, step = late_record([sampler.step(number) for number in range(STEPS)])
    there = yard.job(FULL, tmp_path / "there", "validation.prompts=[]", cache=cache)
    poison(list_entries(there.context, there.samples.training, there.samples.prompt_controls), record)
    options = ("checkpoint.checkpointing_steps=1", "train.log_every_steps=1", "validation.prompts=[]")
    process = start(FULL, tmp_path / "run", TWO, *options, cache=cache)
    code, errors = process.end()
    assert code == ExitCode.DIVERGED, errors
    assert str(entries.records[record].path) in errors
    assert errors.count("is NaN or infinite") == 1
    assert steps_saved(process.run_dir)[-1] == f"step-{step - 1:06d}"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_entry_that_one_rank_cannot_read_loses_no_step(
    rank: int, start: Start, yard: Workshop, straight: Process, tmp_path: Path
) -> None:
    job = yard.job(FULL, tmp_path / "here")
    cache = Path(shutil.copytree(straight.cache, tmp_path / "cache"))
    entries = list_entries(job.context, job.samples.training, job.samples.prompt_controls)
    sampler = make_sampler(job.context, entries)
    first: dict[int, tuple[int, int]] = {}
    for step in range(STEPS):
        for number, (sample,) in enumerate(sampler.step(step)):
            first.setdefault(sample.record, (step, number % 2))
    step, record = max((at, record) for record, (at, reader) in first.items() if reader == rank)
    assert step > 0
    there = yard.job(FULL, tmp_path / "there", cache=cache)
    held = list_entries(there.context, there.samples.training, there.samples.prompt_controls)
    path = held.cache.path("latents", held.latents[record].key)
    flip(path)
    process = start(FULL, tmp_path / "run", TWO, SURE, "checkpoint.checkpointing_steps=1000", cache=cache)
    code, errors = process.end()
    assert code == ExitCode.BAD_DATA, errors
    assert errors.count(f"{path}: this cache entry is ") == 1
    assert steps_saved(process.run_dir) == [f"step-{step:06d}"]
    process = start(FULL, tmp_path / "run", TWO, SURE, cache=cache)
    assert f"resumed from step-{step:06d}" in ended(process)
    require_as_one(process, straight)
