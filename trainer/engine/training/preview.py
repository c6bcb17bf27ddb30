"""Previews of the current model, kept by step, and one picture of base model and result."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from trainer.config.secrets import redacted
from trainer.data.pictures.buckets import buckets, nearest_bucket
from trainer.data.pictures.images import read_image
from trainer.engine.caching.entries import Entries, Prompt
from trainer.engine.context import Context
from trainer.engine.ranks import ALONE, Ranks
from trainer.engine.results import pictures
from trainer.engine.training.state import Run
from trainer.families.values import PreviewPrompt
from trainer.files import atomic
from trainer.files.steps import step_in
from trainer.telemetry.status import Phase

BEFORE_AFTER = "before_after.png"
_RESULT = {"lora": "with the LoRA", "full": "fine-tuned"}


def draw_previews(run: Run, step: int) -> Path | None:
    """Sample every validation prompt; gives the strip of all previews, None where there are no prompts.

    `samples/step-NNNNNN/00.png, ...` are the images as they are, `samples/step-NNNNNN.png` is the row of
    them. It is written after them, so that a row means that its images are complete.
    """
    context, prompts = run.context, run.context.config.validation.prompts
    if not prompts:
        return None
    drawn: Sequence[Image.Image | str] = sample(context, run.built.model, run.entries, context.ranks)
    path = preview_path(context, step)
    run.journal.look_at_folder()
    drop_previews_after(context, step - 1)
    images = [pictures.shown(one) for one in drawn]
    for number, one in enumerate(drawn):
        write_drawn(context, run.entries, number, one, path.with_suffix("") / f"{number:02d}.png")
    pictures.write_png(pictures.row(images, [*map(redacted, prompts)], f"step {step}"), path)
    strip = pictures.write_strip(path.parent)
    run.journal.picture("previews", path, step)
    return strip


def write_drawn(
    context: Context, entries: Entries, number: int, drawn: Image.Image | str, target: Path
) -> None:
    """Write the picture of the prompt `number` with its settings inside; an answer on a card, and as a text
    beside it. Raises StorageError.
    """
    drawn_as = _drawn_as(context, number, entries.prompts[number])
    pictures.write_png(pictures.shown(drawn), target, drawn_as)
    if isinstance(drawn, str):
        atomic.write_text(target.with_suffix(".txt"), drawn + "\n")


def preview_path(context: Context, step: int) -> Path:
    """The row of a step; its images are in the folder of the same stem."""
    return context.run_dir / "samples" / f"step-{step:06d}.png"


def drop_previews_after(context: Context, step: int) -> None:
    """Remove the previews of steps that this run is going to draw again; of each the row first. Raises
    StorageError.
    """
    for path in list((context.run_dir / "samples").glob("step-*")):
        found = step_in(path)
        if found is not None and found > step:
            with atomic.no_space_told(path):
                path.with_suffix(".png").unlink(missing_ok=True)
            atomic.remove_folder(path.with_suffix(""))  # what is in use there stays: no row shows it


def _drawn_as(context: Context, number: int, prompt: Prompt) -> dict[str, str]:
    """The prompt of an image and the settings that it was drawn with, kept inside its file."""
    validation = context.config.validation
    values: dict[str, object] = {
        "num_inference_steps": validation.num_inference_steps,
        "guidance_scale": validation.guidance_scale,
        "max_new_tokens": validation.max_new_tokens,
        "seed": validation.seed + number,
    }
    if "latents" in context.family.encoder_components:
        del values["max_new_tokens"]
        width, height = _size(context, prompt)
        values |= {"width": width, "height": height}
    if prompt.controls:
        values["controls"] = " ".join(control.content_sha256 for control in prompt.controls)
    if prompt.empty is not None and prompt.empty.caption:
        values["negative_prompt"] = redacted(prompt.empty.caption)
    settings = {name: str(value) for name, value in values.items()}
    return {"prompt": redacted(prompt.entry.caption), **settings}


def _is_drawn(text: Mapping[str, str], image: Image.Image, drawn_as: Mapping[str, str]) -> bool:
    """Whether a preview was drawn so. Those with control images said once that they are square, whatever
    their size.
    """
    if text == drawn_as:
        return True
    size = {"width": str(image.width), "height": str(image.height)}
    square = text.get("width") == text.get("height")
    return square and {**text, **size} == drawn_as and "controls" in drawn_as


def write_before_after(context: Context, entries: Entries, step: int, *, drawn: bool) -> None:
    """Put the previews of the base model over those of `step`, where some were `drawn`, and say where.

    Says why where it cannot (previews of step 0 are missing, or were drawn otherwise), and removes the
    picture of an earlier start, which is of another result.
    """
    every = context.config.validation.prompts
    prompts = every[: pictures.MOST_COMPARED]
    target = context.run_dir / BEFORE_AFTER
    if not drawn:
        if target.exists():
            target.unlink()
            context.say(f"no {BEFORE_AFTER}: an earlier start's is removed, and this one draws no previews")
        return
    rows: list[list[Image.Image]] = [[], []]
    for number in range(len(prompts)):
        for images, of_step in zip(rows, (0, step), strict=True):
            path = preview_path(context, of_step).with_suffix("") / f"{number:02d}.png"
            fault = "shows another prompt, or was drawn with other settings"
            try:
                image, text = pictures.read_png(path)
                if _is_drawn(text, image, _drawn_as(context, number, entries.prompts[number])):
                    images.append(pictures.compared(image))
                    continue
            except FileNotFoundError:
                fault = "is missing"
            except OSError as error:
                fault = f"cannot be read ({error})"
            target.unlink(missing_ok=True)
            context.say(f"no {BEFORE_AFTER}: {path.relative_to(context.run_dir)} {fault}")
            return
    titles = ("base model", f"{_RESULT[context.config.method]}, step {step}")
    pictures.write_png(pictures.before_after(rows, [*map(redacted, prompts)], titles), target)
    context.say(f"before and after: {target}{pictures.first_of(len(every))}")


def sample(
    context: Context, model: Any, entries: Entries, ranks: Ranks = ALONE
) -> list[Image.Image] | list[str]:
    """Draw one image, or write one answer, a validation prompt; the model's training mode is put back.

    Prompt n is that of rank n mod N, and every rank is given all of them. The VAE is loaded for the time of
    the previews only. A stop request raises between two denoising steps, on all ranks.

    Where all pass through the model together each draws as many images, and all of them write every answer:
    these have as many tokens as they need.
    """
    count = len(entries.prompts)
    if not context.plan.in_rows:
        own = range(ranks.rank, count, ranks.size)
        shares = ranks.agreed(lambda: _own_share(context, model, entries, own) if own else [])
    elif not count:
        return []
    else:
        talks = context.family.sample_kind == "conversation"
        numbers = range(count) if talks else ranks.in_lockstep(count)
        made: list[_Prepared] = []
        # what one rank cannot read all are told before any of them passes through the model
        context.ranks.agreed(lambda: made.append(_prepare(context, entries, numbers)))
        images = _drawn(context, model, made.pop())
        if talks:
            return images
        shares = ranks.gathered(images)
    return [shares[number % ranks.size][number // ranks.size] for number in range(count)]


def _own_share(context: Context, model: Any, entries: Entries, numbers: Sequence[int]) -> list[Any]:
    return _drawn(context, model, _prepare(context, entries, numbers))


class _Prepared(NamedTuple):
    """Inputs of previews besides the model."""

    prompts: Sequence[PreviewPrompt]
    encoders: Any


def _prepare(context: Context, entries: Entries, numbers: Sequence[int]) -> _Prepared:
    """Read the prompts with these numbers, and load what decodes."""
    context.status.beat(Phase.PREVIEW)
    encoders = context.family.load_encoders(
        "latents" if "latents" in context.family.encoder_components else "text",
        context.source,
        device=context.device,
        dtype=context.dtype,
        vae_tiling=context.plan.vae_tiling,
    )
    return _Prepared([_prompt(context, entries, number) for number in numbers], encoders)


def _drawn(context: Context, model: Any, prepared: _Prepared) -> list[Any]:
    def alive() -> None:
        if context.plan.in_rows:  # of ranks that draw together none ends alone
            context.ranks.agreed(context.stop.raise_if_requested)
            context.status.beat(Phase.PREVIEW, item_done=True)
        else:
            context.alive(Phase.PREVIEW, item_done=True)

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            settings, (prompts, encoders) = context.config.validation, prepared
            return [*context.family.preview(model, context.source, encoders, prompts, settings, alive)]
    finally:
        model.train(was_training)
        del encoders, prepared
        gc.collect()
        torch.cuda.empty_cache()  # the next phase starts from its own peak


def _size(context: Context, prompt: Prompt) -> tuple[int, int]:
    """Width and height of a prompt's image: of its first control image's aspect, else a square."""
    side = context.config.validation.resolution or context.config.data.resolution
    if not prompt.controls:
        return side, side
    first = prompt.controls[0]
    return nearest_bucket(first.width, first.height, buckets(side, context.family.pixel_multiple))


def _prompt(context: Context, entries: Entries, number: int) -> PreviewPrompt:
    """A prompt's entries and the size of its image."""
    prompt = entries.prompts[number]
    width, height = _size(context, prompt)
    cache, empty = entries.cache, prompt.empty
    return PreviewPrompt(
        text=cache.read("text", prompt.entry.key),
        empty=None if empty is None else cache.read("text", empty.key),
        controls=tuple(read_image(one.path, content_sha256=one.content_sha256) for one in prompt.controls),
        width=width,
        height=height,
        number=number,
    )
