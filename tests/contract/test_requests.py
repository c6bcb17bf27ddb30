"""Checkpoints and previews that are asked for while a run trains: there at once, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.runs import (
    LORA_CASES,
    KilledError,
    ToldStatus,
    Workshop,
    different,
    files,
    numbers,
    steps_saved,
)
from trainer.telemetry import control
from trainer.telemetry.control import Order
from trainer.telemetry.status import Phase

SHORT = (
    "train.max_train_steps=5", "checkpoint.checkpointing_steps=100", "validation.held_out=0",
    "validation.every_steps=100",
)  # fmt: skip


def test_what_was_asked_for_is_there_after_that_step_and_changes_nothing_else(
    workshop: Workshop, tmp_path: Path
) -> None:
    runtime = tmp_path / "asked/runtime"

    def ask(phase: Phase, step: int | None, item_done: bool) -> None:
        if phase is Phase.TRAIN and item_done and step in asked:
            for order in asked[step]:
                control.put(runtime, order)

    asked = {2: (Order.SAVE, Order.SAMPLE), 4: (Order.SAVE,), 5: (Order.SAMPLE,)}
    job = workshop.job(LORA_CASES[0], tmp_path / "asked", *SHORT, status=ToldStatus(tmp_path / "asked", ask))
    job.train()
    assert steps_saved(job.folder) == ["step-000004", "step-000005"], "checkpoints_total_limit is kept to"
    pictures = sorted(path.name for path in job.folder.glob("samples/step-*.png"))
    assert pictures == ["step-000000.png", "step-000002.png", "step-000005.png"]
    told = [line for line in job.said if line.startswith("asked to ")]
    assert told == [
        "asked to save, done at step 2: checkpoints/step-000002",
        "asked to sample, done at step 2: samples/step-000002.png",
        "asked to save, done at step 4: checkpoints/step-000004",
    ]
    answers = {one.order: (one.step, one.done) for one in control.requests(runtime)}
    assert answers[Order.SAVE] == (4, "checkpoints/step-000004")
    assert answers[Order.SAMPLE][0] == 5 and "training was over" in answers[Order.SAMPLE][1]
    straight = workshop.job(LORA_CASES[0], tmp_path / "straight", *SHORT)
    straight.train()
    assert numbers(job.folder) == numbers(straight.folder)
    assert not different(files(job.folder, "lora/*"), files(straight.folder, "lora/*"))


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_that_was_asked_for(workshop: Workshop, tmp_path: Path) -> None:
    """Killed after step 4: it goes on from step 3, whose preview is there, and without that of step 4."""
    folder = tmp_path / "run"

    def ask(phase: Phase, step: int | None, item_done: bool) -> None:
        if phase is Phase.TRAIN and item_done and step == 3:
            control.put(folder / "runtime", Order.SAVE)
        if phase is Phase.TRAIN and item_done and step in (3, 4):
            control.put(folder / "runtime", Order.SAMPLE)
        if phase is Phase.TRAIN and item_done and step == 5:
            raise KilledError

    with pytest.raises(KilledError):
        workshop.job(LORA_CASES[0], folder, *SHORT, status=ToldStatus(folder, ask)).train()
    assert (folder / "run/samples/step-000004.png").exists()
    again = workshop.job(LORA_CASES[0], folder, *SHORT)
    again.train()
    assert "resumed from step-000003" in again.said
    pictures = sorted(path.name for path in again.folder.glob("samples/step-*.png"))
    assert pictures == ["step-000000.png", "step-000003.png", "step-000005.png"]
    straight = workshop.job(LORA_CASES[0], tmp_path / "straight", *SHORT)
    straight.train()
    assert not different(files(again.folder, "lora/*"), files(straight.folder, "lora/*"))
