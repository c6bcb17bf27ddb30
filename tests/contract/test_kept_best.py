"""The kept LoRA of the lowest held-out loss: its file is read back when it is written, and at a run's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.contract.runs import LORA_CASES, Workshop
from trainer.engine import run
from trainer.engine.training.held_out import FOLDER, prove_best, read_best
from trainer.errors import DataError, ExitCode

SHORT = ("train.max_train_steps=4", "validation.every_steps=2", "validation.prompts=[]")


def test_one_that_reads_back_otherwise_does_not_take_the_place(
    workshop: Workshop, tmp_path: Path, flipped_bit: list[Path]
) -> None:
    job = workshop.job(LORA_CASES[0], tmp_path, *SHORT)
    job.train()
    told = [line for line in job.said if "is not kept as the best" in line]
    assert len(told) == 1 and "1 tensor read back from disk differs from the trained ones" in told[0]
    assert flipped_bit[0].parent.name == f"{FOLDER}.tmp"
    found = read_best(job.folder)
    assert found is not None and f"the LoRA of step {found['step']} " not in told[0]


def test_a_file_with_another_loss_than_was_measured_ends_the_run(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values changed on the disk after it was written and read back."""

    def spoilt(context: Any, *others: Any) -> None:
        kept = read_best(context.run_dir)
        assert kept is not None
        path = context.run_dir / FOLDER / kept["file"]
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        tensors[max(name for name in tensors if "lora_B" in name)] += 1.0
        save_file(tensors, path, metadata)
        prove_best(context, *others)

    monkeypatch.setattr(run, "prove_best", spoilt)
    job = workshop.job(LORA_CASES[0], tmp_path, *SHORT)
    with pytest.raises(DataError, match="has a held-out loss of") as caught:
        job.train()
    assert caught.value.exit_code == ExitCode.BAD_DATA
    assert Path(caught.value.problems[0].where).parent == job.folder / FOLDER
