"""A run of which every step overflowed fp16: the end of the run says so, not that it is too short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.runs import Case, Workshop
from trainer.engine.optimizing import updater
from trainer.errors import DivergedError


def test_a_run_whose_steps_all_overflow_says_what_to_train_in(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updater, "_START", 2.0**60)
    options = (
        "model.dtype=fp16",
        "train.max_train_steps=2",
        "validation.prompts=[]",
        "validation.held_out=0",
    )
    with pytest.raises(
        DivergedError, match="was applied, as the gradients of each overflowed fp16"
    ) as caught:
        workshop.job(Case(family="flux1_dev", method="lora"), tmp_path, *options).train()
    assert caught.value.problems[0].remedy.startswith("write model.dtype: bf16")
