"""The quickstart's LoRA teaches its style to things that it was not shown, and nothing else passes for that.

`trainer train` trains with the shipped configuration and pictures, in fewer steps. What it saved is measured
on a fresh base model. So are the base model alone and a LoRA of another style, which the check must refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from scripts.style import is_style
from tests.contract.runs import ROOT, job_of
from tests.e2e.conftest import environment
from tests.e2e.nursery import Nursery
from tests.overlap import overlap
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUICKSTART = ROOT / "train_configs" / "quickstart.yaml"
STYLE, HELD_OUT = ROOT / "examples" / "style", ROOT / "examples" / "style-held-out"
THINGS = ("castle", "penguin", "robot", "unicorn", "purple-heart", "green-circle")
"""Drawn by each model, of what is held out: four that the base model knows, two that it never saw either."""
STEPS, OTHER_STEPS = 60, 30
LEAST_FALL, LEAST_STYLED = 0.9, len(THINGS) - 2
"""The style is learned when the held-out loss fell by this share, and so many of THINGS are in the style.

Four seeds gave 94 to 95 % and five or six of six; a LoRA of another style 74 to 77 % and none.
"""
LEAST_OVERLAP = 0.6
"""Least overlap that passes; the lowest of four seeds was 0.86."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model on what was held out."""

    loss: float
    pictures: Sequence[Image.Image]
    """Pictures of THINGS."""


Measure = Callable[[Path | None], Measured]
Train = Callable[[str, Path, int], Path]


def shortcomings(base: Measured, model: Measured) -> list[str]:
    """Why `model` has not learned the style; nothing where it has."""
    styled = [thing for thing, picture in zip(THINGS, model.pictures, strict=True) if is_style(picture)]
    found = []
    if model.loss > (1 - LEAST_FALL) * base.loss:
        found.append(f"loss: {base.loss:.3g} -> {model.loss:.3g}")
    if len(styled) < LEAST_STYLED:
        found.append(f"style: only {styled}")
    return found


def recoloured(folder: Path) -> Path:
    """The style's drawings in shades of brown: the same pictures with red and blue exchanged."""
    folder.mkdir()
    for path in sorted(STYLE.glob("*.png")):
        with Image.open(path) as picture:
            Image.merge("RGB", picture.split()[::-1]).save(folder / path.name)
        (folder / path.with_suffix(".txt").name).write_text(path.with_suffix(".txt").read_text())
    return folder


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """Measures the base model, with a LoRA file or without."""
    import torch

    from trainer.engine.building.build import load_base
    from trainer.engine.caching.entries import list_entries
    from trainer.engine.caching.fill import fill_cache
    from trainer.engine.training.held_out import held_out_entries, measure
    from trainer.engine.training.preview import sample
    from trainer.modeling.quiet import quiet_libraries

    quiet_libraries()
    torch.set_num_threads(1)
    prompts = ", ".join(f'"{thing.replace("-", " ")}, cyanotype style"' for thing in THINGS)
    settings = (f"validation.prompts=[{prompts}]", f"output_dir={tmp_path}")
    job = job_of(QUICKSTART, tmp_path / "measure", *settings, cache=tmp_path / "cache")
    context, held_out = job.context, held_out_entries(job.context, job.samples.held_out)
    assert held_out is not None
    entries = list_entries(context, job.samples.held_out)
    fill_cache(context, entries)

    def measured(file: Path | None) -> Measured:
        model = load_base(context).module
        if file is not None:
            context.family.load_adapter(model, file)
        loss = measure(context, model, held_out, step=0).validation_loss
        return Measured(loss=loss, pictures=sample(context, model, entries))

    return measured


@pytest.fixture
def train(tmp_path: Path, nursery: Callable[..., Nursery]) -> Train:
    """Gives the LoRA file of a run of the quickstart by name, pictures and steps, without its previews."""

    def trained(name: str, pictures: Path, steps: int) -> Path:
        settings = [f"train.max_train_steps={steps}", "validation.prompts=[]", "validation.img_dir=null"]
        words = ["-m", "trainer", "train", str(QUICKSTART), "--dataset", str(pictures)]
        words += ["--output", str(tmp_path / name)]
        words += [word for setting in settings for word in ("--set", setting)]
        own = environment(tmp_path, free_port(), tmp_path / "cache")
        nursery(alternate=True).run(words, own).check_returncode()
        return tmp_path / name / "lora" / f"{name}.safetensors"

    return trained


def test_the_lora_teaches_the_style_and_nothing_else_passes_for_it(
    tmp_path: Path, measure: Measure, train: Train
) -> None:
    """One test, since processes that shared its parts would each fill a cache and measure the base."""
    base = measure(None)
    assert not any(map(is_style, base.pictures))
    assert len(shortcomings(base, base)) == 2

    styled = measure(train("styled", STYLE, STEPS))
    assert shortcomings(base, styled) == []
    for thing, picture in zip(THINGS, styled.pictures, strict=True):
        with Image.open(HELD_OUT / f"{thing}.png") as real:
            assert overlap(picture, real) > LEAST_OVERLAP, thing

    brown = measure(train("brown", recoloured(tmp_path / "pictures"), OTHER_STEPS))
    assert brown.loss < base.loss, "it learned something"
    assert not any(map(is_style, brown.pictures))
    assert len(shortcomings(base, brown)) == 2
