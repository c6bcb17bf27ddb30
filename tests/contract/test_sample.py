"""`trainer sample` draws what the run that made the LoRA, or the model, drew at its end."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.conftest import Finished
from tests.contract.loaders import lora_file
from tests.contract.runs import FULL_CASES, LORA_CASES, SHORT_STEPS, Case, fewer, mostly_slow
from trainer.engine import run
from trainer.engine.context import Context
from trainer.engine.results.pictures import before_after, read_png, row


def with_controls(done: Finished) -> Context:
    """The run's context with its prompts' control images named."""
    config = done.job.context.config
    named = tuple(tuple(one.path for one in controls) for controls in done.job.samples.prompt_controls)
    validation = config.validation.model_copy(update={"control_images": named})
    return dataclasses.replace(done.job.context, config=config.model_copy(update={"validation": validation}))


@pytest.mark.parametrize("case", mostly_slow(LORA_CASES), ids=str)
def test_base_and_lora_alone_and_in_one_picture(
    case: Case, finished: Callable[[Case], Finished], tmp_path: Path
) -> None:
    done = finished(case)
    file = lora_file(done)
    path = str(file)
    captions = done.job.context.config.validation.prompts
    base, result = (
        [read_png(image)[0] for image in sorted(done.folder.glob(f"samples/step-{step:06d}/*.png"))]
        for step in (0, SHORT_STEPS)
    )
    both = ("base model", file.name)
    expected = {
        ("", False): row(base, captions, "base model"),
        (path, False): row(result, captions, file.name),
        (path, True): before_after((base, result), captions, both),
    }
    for (lora, together), picture in expected.items():
        spec = dataclasses.replace(
            done.job.spec,
            mode="sample",
            lora_file=lora,
            before_after=together,
            output_file=str(tmp_path / "out.png"),
        )
        # a family that edits is told which pictures: no samples are read here
        run.sample_once(with_controls(done), spec)
        assert read_png(tmp_path / "out.png")[0].tobytes() == picture.tobytes()


@pytest.mark.parametrize("case", fewer(FULL_CASES), ids=str)
def test_a_full_fine_tune_alone_and_below_its_base(
    case: Case, finished: Callable[[Case], Finished], tmp_path: Path
) -> None:
    done = finished(case)
    captions = done.job.context.config.validation.prompts
    base, result = (
        [read_png(image)[0] for image in sorted(done.folder.glob(f"samples/step-{step:06d}/*.png"))]
        for step in (0, SHORT_STEPS)
    )
    # what was not trained need not be there
    alone = tmp_path / "run" / "model"
    trained = done.job.context.family.trained_component
    shutil.copytree(done.folder / "model" / trained, alone / trained)
    title = "run/model"
    expected = {
        False: row(result, captions, title),
        True: before_after((base, result), captions, ("base model", title)),
    }
    for together, picture in expected.items():
        spec = dataclasses.replace(
            done.job.spec,
            mode="sample",
            model_folder=str(alone),
            before_after=together,
            output_file=str(tmp_path / "out.png"),
        )
        run.sample_once(with_controls(done), spec)
        assert read_png(tmp_path / "out.png")[0].tobytes() == picture.tobytes()
