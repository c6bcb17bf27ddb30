"""`trainer sample` draws what the run that made the LoRA drew at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.conftest import Finished
from tests.contract.runs import LORA_CASES, STEPS, Case
from trainer.engine import run
from trainer.engine.pictures import before_after, read_png, row


@pytest.mark.parametrize("case", LORA_CASES, ids=str)
def test_base_and_lora_alone_and_in_one_picture(
    case: Case, finished: Callable[[Case], Finished], tmp_path: Path
) -> None:
    done = finished(case)
    path = str(done.folder / "lora" / "run.safetensors")
    captions = done.job.context.config.validation.prompts
    base, result = (
        [read_png(image)[0] for image in sorted((done.folder / "samples" / f"step-{step:06d}").iterdir())]
        for step in (0, STEPS)
    )
    both = ("base model", "run.safetensors")
    expected = {
        ("", False): row(base, captions, "base model"),
        (path, False): row(result, captions, "run.safetensors"),
        (path, True): before_after((base, result), captions, both),
    }
    for (lora_file, together), picture in expected.items():
        spec = dataclasses.replace(
            done.job.spec,
            mode="sample",
            lora_file=lora_file,
            before_after=together,
            output_file=str(tmp_path / "out.png"),
        )
        run.sample_once(done.job.context, spec)
        assert read_png(tmp_path / "out.png")[0].tobytes() == picture.tobytes()
