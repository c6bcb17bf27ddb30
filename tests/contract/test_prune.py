"""`trainer cache --prune` beside a run that trains with the same cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.contract.runs import Case, ToldStatus, Workshop
from trainer.engine import run
from trainer.engine.caching.entries import list_entries
from trainer.telemetry.status import Phase

CASE = Case(family="flux1_dev", method="lora")
QUIET = ("validation.prompts=[]", "validation.held_out=0", "train.max_train_steps=3")


def test_a_prune_leaves_a_run_that_trains_its_entries(workshop: Workshop, tmp_path: Path) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "run"
    other = workshop.job(CASE, tmp_path / "other", *QUIET, "data.trigger_word=abc", cache=cache)
    pruning = dataclasses.replace(other.spec, mode="cache", prune=True)

    def prune_late(phase: Phase, step: int | None, item_done: bool) -> None:
        if phase is Phase.TRAIN and item_done and step == 1:
            run.do(other.context, other.samples, pruning)

    values = (*QUIET, "data.cache_in_memory=false")
    job = workshop.job(CASE, folder, *values, cache=cache, status=ToldStatus(folder, prune_late))
    run.do(job.context, job.samples, job.spec)
    assert any("stay: another run uses this cache now" in line for line in other.said)
    texts = list_entries(job.context, job.samples.training).texts
    entries = list_entries(job.context, job.samples.training).cache
    assert all(entries.has("text", text.key) for text in texts)
    run.do(other.context, other.samples, pruning)
    assert not any(entries.has("text", text.key) for text in texts if text.caption)
