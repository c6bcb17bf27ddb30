"""Progress of the held-out loss before the first step, which may take long while nothing is trained yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.runs import Case, Workshop


def test_the_samples_of_the_first_held_out_loss_are_counted(
    workshop: Workshop, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case(family="flux1_dev", method="lora")
    options = ("validation.held_out=3", "validation.prompts=[]", "train.max_train_steps=2")
    workshop.job(case, tmp_path, *options, "validation.every_steps=1").train()
    lines = capfd.readouterr().err.splitlines()
    shown = [line for line in lines if line.startswith("measuring the held-out loss")]
    assert shown == ["measuring the held-out loss 3/3"]  # that of later steps is part of training's lines
    first = next(number for number, line in enumerate(lines) if line.startswith("training"))
    assert lines.index(shown[0]) < first
