"""Pictures of real shape through the command line: stopped, killed, and equal to the bit.

Conversations of real shape are resumed in tests/contract/test_real_shaped.py, and read by processes with
other orders of hashes in test_ranks.py; test_interruptions.py stops and kills a run that learns from texts.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.contract.real_shaped import CHECKPOINT_STEP, few, settings
from tests.contract.runs import Case, different, files, numbers, products, steps_saved
from tests.e2e.conftest import Start
from trainer.errors import ExitCode
from trainer.telemetry.status import Phase

CASE = Case(family="qwen_image", method="lora")
SHAPE = ("train.train_batch_size=4", "train.gradient_accumulation_steps=1", "train.max_train_steps=8")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_and_killed_run_is_the_run_without(start: Start, tmp_path: Path) -> None:
    chosen = (*settings(CASE.family), few(CASE.family, tmp_path / "few"), *SHAPE)
    straight = start(CASE, tmp_path / "straight", *chosen)
    code, errors = straight.end()
    assert code == 0, errors

    process = start(CASE, tmp_path / "resumed", *chosen)
    process.wait_for_phase(Phase.TRAIN)
    process.popen.send_signal(signal.SIGTERM)
    code, errors = process.end()
    assert code == ExitCode.STOPPED, errors
    saved = steps_saved(process.run_dir)
    assert saved

    process = start(CASE, tmp_path / "resumed", *chosen)
    later = f"step-{(int(saved[-1].removeprefix('step-')) // CHECKPOINT_STEP + 1) * CHECKPOINT_STEP:06d}"
    process.wait_until((process.run_dir / "checkpoints" / later).is_dir)
    os.kill(process.child(), signal.SIGKILL)
    process.end()

    process = start(CASE, tmp_path / "resumed", *chosen)
    code, errors = process.end()
    assert code == 0, errors
    assert f"resumed from {later}" in errors
    assert "Proved: " in errors
    assert numbers(process.run_dir) == numbers(straight.run_dir)
    assert products(process.run_dir)
    assert not different(products(process.run_dir), products(straight.run_dir))
    kept = "checkpoints/*/*"
    assert not different(files(process.run_dir, kept), files(straight.run_dir, kept))
