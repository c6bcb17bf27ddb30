"""A run whose folder another one has taken between two lines of its log writes nothing there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.contract.runs import LORA_CASES, Job, ToldStatus, Workshop
from trainer.errors import ConfigError, ExitCode
from trainer.telemetry import control
from trainer.telemetry.control import Order
from trainer.telemetry.rundir import LOCK_FILE
from trainer.telemetry.status import Phase

RARE = ("train.max_train_steps=9", "train.log_every_steps=50", "validation.every_steps=50")
HELD_OUT = ("validation.held_out=2", "validation.prompts=[]", "validation.every_steps=3")


@pytest.mark.parametrize(
    ("overrides", "stops", "asks"),
    [
        ((*RARE, "checkpoint.checkpointing_steps=3"), False, False),
        ((*RARE, *HELD_OUT), False, False),
        (RARE, True, False),
        (RARE, False, True),
    ],
    ids=["a checkpoint", "the best LoRA", "a stop", "a preview"],
)
def test_nothing_is_written_among_the_files_of_the_run_that_has_the_folder_now(
    overrides: tuple[str, ...], stops: bool, asks: bool, workshop: Workshop, tmp_path: Path
) -> None:
    job: Job

    def take(phase: Phase, step: int | None, item_done: bool) -> None:
        if phase is not Phase.TRAIN or not item_done or step != 2:
            return
        shutil.rmtree(job.folder)
        (job.folder / "checkpoints").mkdir(parents=True)
        (job.folder / LOCK_FILE).write_text('{"supervisor": 8}')
        if stops:
            job.context.stop.requested = ExitCode.STOPPED
        if asks:
            control.put(tmp_path / "runtime", Order.SAMPLE)

    job = workshop.job(LORA_CASES[0], tmp_path, *overrides, status=ToldStatus(tmp_path, take))
    with pytest.raises(ConfigError, match="another run has this folder now") as caught:
        job.train()
    assert caught.value.exit_code == ExitCode.BAD_CONFIG
    there = sorted(str(path.relative_to(job.folder)) for path in job.folder.rglob("*"))
    assert there == sorted(["checkpoints", LOCK_FILE])
    assert (job.folder / LOCK_FILE).read_text() == '{"supervisor": 8}'
