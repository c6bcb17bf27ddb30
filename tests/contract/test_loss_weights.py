"""Masks and weights change the loss by exactly the stated factor, in every family and in a whole run."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.contract.runs import LORA_CASES, Case, Workshop, draws, numbers
from trainer import families
from trainer.families.values import Batch, Draw, Shape

FLUX = Case(family="flux1_dev", method="lora")
DRAWING = [case for case in LORA_CASES if draws(case.family)]


def example(case: Case, workshop: Workshop, folder: Path) -> tuple[Batch, Draw, Any]:
    """A batch of two, its draw and the family's settings."""
    context = workshop.job(case, folder).context
    family = context.family
    shape = Shape(batch_size=2, width=64, height=32, text_tokens=8, bytes_per_value=4)
    config = context.source.component_config(family.trained_component)
    batch = family.synthetic_batch(config, shape, seed=1)
    settings = family.settings(context.source, context.config)
    header = {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}
    draw = family.draw(settings, [0, 1], header)
    assert draw is not None
    return batch, draw, settings


@pytest.mark.parametrize("case", DRAWING, ids=str)
def test_the_loss_is_multiplied_where_the_mask_says(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    batch, draw, settings = example(case, workshop, tmp_path)
    predicted = torch.randn(batch.latents["mean"].shape, generator=torch.Generator().manual_seed(2))
    family = dataclasses.replace(families.get(case.family), predict=lambda *_: predicted)

    def losses(**extra: torch.Tensor) -> torch.Tensor:
        with_extra = dataclasses.replace(batch, latents={**batch.latents, **extra})
        return family.loss(torch.nn.Identity(), with_extra, draw, settings)

    plain, (height, width) = losses(), predicted.shape[2:]
    ones = torch.ones(2, 1, height, width)
    assert torch.equal(losses(loss_mask=ones, loss_weight=torch.ones(2)), plain)
    assert torch.equal(losses(loss_mask=ones * 0.25), plain * 0.25)
    assert torch.equal(losses(loss_weight=torch.tensor([0.5, 2.0])), plain * torch.tensor([0.5, 2.0]))
    left = ones.clone()
    left[..., width // 2 :] = 0
    together = losses(loss_mask=left) + losses(loss_mask=1 - left)
    assert torch.allclose(together, plain, rtol=1e-6)
    hidden = losses(loss_mask=left)
    predicted[..., width // 2 :] += 100  # what the mask hides has no say
    assert torch.equal(losses(loss_mask=left), hidden)
    assert not torch.allclose(losses(), plain)


def one_step(workshop: Workshop, folder: Path, sets: str, **options: Any) -> float:
    """The loss of the first step."""
    steps = ("train.max_train_steps=1", "train.log_every_steps=1", "validation.prompts=[]")
    job = workshop.job(FLUX, folder, *steps, "validation.held_out=0", f"data.sets=[{{{sets}}}]", **options)
    job.train()
    return numbers(job.folder)[-1]["loss"]


def test_a_run_has_the_sets_weight_and_mask_in_its_loss(workshop: Workshop, tmp_path: Path) -> None:
    """Grey 51 of 255 everywhere is a fifth; halves and quarters are exact in binary."""
    pictures = workshop.samples / "pictures"
    for name, value in (("white", 255), ("grey", 51)):
        (tmp_path / name).mkdir()
        for path in pictures.glob("*.png"):
            Image.new("L", Image.open(path).size, value).save(tmp_path / name / path.name)
    base = f"img_dir: {pictures}"
    plain = one_step(workshop, tmp_path / "a", base)
    assert one_step(workshop, tmp_path / "b", f"{base}, loss_weight: 0.25, is_reg: false") == plain * 0.25
    assert one_step(workshop, tmp_path / "c", f"{base}, mask_dir: {tmp_path / 'white'}") == plain
    assert one_step(workshop, tmp_path / "d", f"{base}, mask_dir: {tmp_path / 'grey'}") == pytest.approx(
        plain * 51 / 255, rel=1e-6
    )


def test_a_masked_set_beside_one_without_masks_trains(workshop: Workshop, tmp_path: Path) -> None:
    """Batches of both kinds are stacked: what has no mask counts everywhere."""
    pictures = workshop.samples / "pictures"
    first, second = tmp_path / "first", tmp_path / "second"
    for number, path in enumerate(sorted(pictures.glob("*.png"))[:4]):
        home = (first, second)[number % 2]
        home.mkdir(exist_ok=True)
        (tmp_path / "masks").mkdir(exist_ok=True)
        (home / path.name).write_bytes(path.read_bytes())
        (home / path.name).with_suffix(".txt").write_text("a thing")
        if home == first:
            Image.new("L", Image.open(path).size, 128).save(tmp_path / "masks" / path.name)
    masked = f"img_dir: {first}, mask_dir: {tmp_path / 'masks'}, flip: true"
    sets = f"{masked}}}, {{img_dir: {second}, loss_weight: 0.5"
    options = ("train.train_batch_size=2", "train.max_train_steps=3", "validation.prompts=[]")
    job = workshop.job(FLUX, tmp_path / "run", *options, "validation.held_out=0", f"data.sets=[{{{sets}}}]")
    job.train()
    assert len(job.samples.training) == 2 * 2 + 2
    assert numbers(job.folder)[-1]["step"] == 3


def test_captions_that_will_be_cut_are_listed_first(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With file and count, before an encoder loads; counts are those of what the encoders make."""
    folder = tmp_path / "set"
    folder.mkdir()
    source = sorted((workshop.samples / "pictures").glob("*.png"))[0]
    for name, caption in (("long", "apple " * 40), ("short", "apple")):
        (folder / f"{name}.png").write_bytes(source.read_bytes())
        (folder / f"{name}.txt").write_text(caption)
    job = workshop.job(
        FLUX, tmp_path / "run", "train.max_train_steps=1", "validation.held_out=0",
        f"validation.prompts=[a pear, {'pear ' * 30}]", f"data.sets=[{{img_dir: {folder}}}]",
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        job.train()
    count = job.context.family.caption_tokens(job.context.source)
    assert count is not None
    assert f"{folder / 'long.png'}: {count(' '.join(['apple'] * 40))} tokens" in caplog.text
    assert f"validation.prompts, prompt 2: {count(' '.join(['pear'] * 30))} tokens" in caplog.text
    assert "longer than data.max_sequence_length, 16 tokens: 1 caption, 1 prompt." in caplog.text
    assert "prompt 1:" not in caplog.text
    assert f"{folder / 'short.png'}: {count('apple')}" not in caplog.text


@pytest.mark.parametrize("family", ["qwen_image", "kandinsky5"])
def test_counts_are_the_lengths_that_encoders_give(family: str, workshop: Workshop, tmp_path: Path) -> None:
    """Families whose encoders do not pad."""
    context = workshop.job(Case(family=family, method="lora"), tmp_path).context
    count = context.family.caption_tokens(context.source)
    assert count is not None
    encoders = context.family.load_encoders(
        "text", context.source, device="cpu", dtype=torch.float32, vae_tiling=False
    )
    for text in ("", "a cat", "a red car and a blue house"):
        encoded = context.family.encode_text(encoders, text, [], prompt=False, max_sequence_length=512)
        assert max(len(tensor) for tensor in encoded.values() if tensor.ndim == 2) == count(text)
