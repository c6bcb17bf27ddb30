"""Runs that end before their last planned step, whole, by a plain reading of their own metrics.jsonl."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import (
    CASES,
    LORA_CASES,
    KilledError,
    Workshop,
    different,
    dying_after,
    fewer,
    files,
    numbers,
    products,
    steps_saved,
)
from trainer.engine.training.held_out import read_best
from trainer.telemetry.runs import read_run
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics
from trainer.telemetry.status import read_status, verdict

PATIENCE, DELTA = 2, 0.08
LONG = ("train.max_train_steps=40", "validation.every_steps=2", "checkpoint.checkpointing_steps=3")
EARLY = (
    *LONG,
    f"validation.early_stop.patience={PATIENCE}",
    f"validation.early_stop.min_delta={DELTA}",
    "validation.prompts=[an apple]",
)
NEVER_BETTER = (*LONG, "validation.early_stop.patience=3", "validation.early_stop.min_delta=100")
"""Ends after three rounds: the kill comes after the second one, the checkpoint after the first."""


def losses(run_dir: Path) -> list[tuple[int, float]]:
    rows = read_metrics(run_dir / METRICS_LOG)
    return [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]


def end_by_hand(measured: list[tuple[int, float]], patience: int, delta: float) -> int | None:
    """The step at which the last `patience` losses are no better than the best one before them."""
    best = best_at = None
    for place, (step, loss) in enumerate(measured):
        if best is None or loss < best - delta:
            best, best_at = loss, place
        assert best_at is not None
        if place - best_at == patience:
            return step
    return None


@pytest.mark.parametrize("case", fewer(CASES), ids=str)
def test_a_run_ends_where_its_losses_say_and_is_whole(case: Any, workshop: Workshop, tmp_path: Path) -> None:
    job = workshop.job(case, tmp_path, *EARLY)
    job.train()
    measured = losses(job.folder)
    last = measured[-1][0]
    assert last == end_by_hand(measured, PATIENCE, DELTA)
    assert last < 40, "the case is too easy: it never ends early"
    assert steps_saved(job.folder)[-1] == f"step-{last:06d}"
    assert (job.folder / "samples" / f"step-{last:06d}.png").exists()
    assert any("Proved: " in line for line in job.said)
    told = [line for line in job.said if line.startswith(f"early stop at step {last}: validation_loss")]
    assert len(told) == 1 and told[0].endswith("; 40 steps were planned")
    run = read_run(job.folder)
    assert run.figures["state"] == "finished early" and run.figures["step"] == f"{last}/40"
    if case.method == "lora":
        best = read_best(job.folder)
        assert best is not None
        lowest = min(loss for step, loss in measured if step)
        assert (best["step"], best["validation_loss"]) == next(
            (step, loss) for step, loss in measured if step and loss == lowest
        )


def test_the_status_says_why_a_run_is_finished(workshop: Workshop, tmp_path: Path) -> None:
    from trainer.telemetry.status import Phase

    job = workshop.job(LORA_CASES[0], tmp_path, *EARLY)
    job.train()
    job.context.status.beat(Phase.DONE)  # as the process does at its end
    status = read_status(tmp_path / "runtime")
    assert status is not None
    assert verdict(status, status.beat).reason.startswith("finished: early stop at step ")


@pytest.mark.slow
def test_a_kill_and_a_resume_end_at_the_same_step_with_the_same_bits(
    workshop: Workshop, tmp_path: Path
) -> None:
    straight = workshop.job(LORA_CASES[0], tmp_path / "straight", *NEVER_BETTER)
    straight.train()
    end = losses(straight.folder)[-1][0]
    assert end == 6
    again = tmp_path / "again"
    with pytest.raises(KilledError):
        workshop.job(LORA_CASES[0], again, *NEVER_BETTER, status=dying_after(again, end - 1)).train()
    job = workshop.job(LORA_CASES[0], again, *NEVER_BETTER)
    job.train()
    assert any(line.startswith("resumed from ") for line in job.said)
    assert losses(job.folder) == losses(straight.folder)
    assert numbers(job.folder) == numbers(straight.folder)
    assert not different(products(job.folder), products(straight.folder))
    last = f"checkpoints/step-{end:06d}/*"
    assert not different(files(job.folder, last), files(straight.folder, last))


@pytest.mark.slow
def test_the_rounds_are_in_the_checkpoint_and_more_patience_goes_on(
    workshop: Workshop, tmp_path: Path
) -> None:
    first = workshop.job(LORA_CASES[0], tmp_path / "run", *EARLY)
    first.train()
    end = losses(first.folder)[-1][0]
    before = files(first.folder, "checkpoints/*/*")
    # the same command again trains nothing and proves again
    same = workshop.job(LORA_CASES[0], tmp_path / "run", *EARLY)
    same.train()
    assert losses(same.folder)[-1][0] == end
    assert not different(files(same.folder, "checkpoints/*/*"), before)
    rows = read_metrics(same.folder / METRICS_LOG)
    assert sum("early_stop" in row for row in rows) == 1
    # without the rows of the metrics the checkpoint alone knows the rounds
    shutil.copytree(tmp_path / "run", tmp_path / "bare")
    (tmp_path / "bare" / "run" / METRICS_LOG).write_text("")
    bare = workshop.job(LORA_CASES[0], tmp_path / "bare", *EARLY)
    bare.train()
    assert any(line.startswith(f"early stop at step {end}: ") for line in bare.said)
    more = (*EARLY, f"validation.early_stop.patience={PATIENCE + 1}")
    longer = workshop.job(LORA_CASES[0], tmp_path / "run", *more)
    longer.train()
    measured = losses(longer.folder)
    assert measured[-1][0] > end
    assert measured[-1][0] in (end_by_hand(measured, PATIENCE + 1, DELTA), 40)


@pytest.mark.slow
def test_a_run_whose_patience_ends_with_its_last_step_wants_more_steps(
    workshop: Workshop, tmp_path: Path
) -> None:
    """It did not stop early: more patience would leave it nothing to train."""
    first = workshop.job(LORA_CASES[0], tmp_path / "early", *EARLY)
    first.train()
    all_steps = (*EARLY, f"train.max_train_steps={losses(first.folder)[-1][0]}")
    workshop.job(LORA_CASES[0], tmp_path / "run", *all_steps).train()
    same = workshop.job(LORA_CASES[0], tmp_path / "run", *all_steps, "train.learning_rate=0.002")
    same.train()
    said = "\n".join(same.said)
    assert "0.002 has no effect" in said and "raise train.max_train_steps to train on" in said
    assert "early_stop.patience" not in said
