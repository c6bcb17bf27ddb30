"""Floor 6: previews: one picture a time with all prompts, and a strip over time."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from trainer.engine.context import Context, free_memory
from trainer.engine.entries import Entries
from trainer.families.protocol import PreviewRequest
from trainer.telemetry import atomic
from trainer.telemetry.status import Phase

_CELL_MINIMUM = 192
_MARGIN = 8
_TEXT_LINES = 2
_STRIP_WIDTH, _STRIP_HEIGHT = 2048, 16384


def draw_previews(context: Context, model: Any, entries: Entries, step: int) -> Path | None:
    """Sample every validation prompt and write `samples/step-NNNNNN.png`; None where there are no prompts.

    The VAE is loaded for the time of the previews only. A stop request raises between two denoising steps.
    """
    validation = context.config.validation
    if not validation.prompts:
        return None
    context.status.beat(Phase.PREVIEW)

    def on_step() -> None:
        context.stop.raise_if_requested()
        context.status.beat(Phase.PREVIEW, item_done=True)

    side = validation.resolution or context.config.data.resolution
    request = PreviewRequest(
        width=side,
        height=side,
        num_inference_steps=validation.num_inference_steps,
        guidance_scale=validation.guidance_scale,
        seed=validation.seed,
    )
    images = sample(context, model, entries.prompts(), request, on_step)
    path = preview_path(context, step)
    write_png(row(images, validation.prompts, f"step {step}"), path)
    return path


def preview_path(context: Context, step: int) -> Path:
    """Where the previews of a step are kept."""
    return context.run_dir / "samples" / f"step-{step:06d}.png"


def sample(
    context: Context, model: Any, prompts: Sequence[Any], request: PreviewRequest, on_step: Any
) -> list[Image.Image]:
    """Draw one image a prompt; the model's training mode is put back."""
    import torch

    vae = context.family.load_encoders(
        "latents",
        context.source,
        device=context.device,
        dtype=context.dtype,
        vae_tiling=context.plan.vae_tiling,
    )
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return context.family.preview(model, context.source, vae, prompts, request, on_step)
    finally:
        model.train(was_training)
        del vae
        free_memory(context.device)


def row(images: Sequence[Image.Image], captions: Sequence[str], title: str) -> Image.Image:
    """Pictures side by side under a title, each with its caption below; small pictures are enlarged to be
    seen.
    """
    enlarge = max(1, -(-_CELL_MINIMUM // images[0].width))
    width, height = images[0].width * enlarge, images[0].height * enlarge
    font_size = max(12, width // 22)
    font = ImageFont.load_default(size=font_size)
    line = font_size + 4
    total_width = (width + _MARGIN) * len(images) + _MARGIN
    picture = Image.new("RGB", (total_width, line + height + line * _TEXT_LINES + 3 * _MARGIN), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((_MARGIN, _MARGIN // 2), title, fill="black", font=font)
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left = _MARGIN + number * (width + _MARGIN)
        picture.paste(image.resize((width, height), Image.Resampling.NEAREST), (left, line + _MARGIN))
        wrapped = textwrap.wrap(caption, width=max(8, int(width / (font_size * 0.5))), max_lines=_TEXT_LINES)
        draw.multiline_text((left, line + height + 2 * _MARGIN), "\n".join(wrapped), fill="black", font=font)
    return picture


def write_strip(samples: Path, *, up_to_step: int) -> Path | None:
    """Stack the pictures of all times into `samples/strip.png`, oldest on top; None where there is none.

    Large ones are made smaller, and of very many an even choice with the first and the last is taken.
    """
    paths = [
        path
        for path in sorted(samples.glob("step-*.png"))
        if int(path.stem.removeprefix("step-")) <= up_to_step
    ]
    if not paths:
        return None
    sizes = []
    for path in paths:
        with Image.open(path) as picture:
            sizes.append(picture.size)
    scale = min(1.0, _STRIP_WIDTH / max(width for width, _ in sizes))
    rows = [(max(1, round(width * scale)), max(1, round(height * scale))) for width, height in sizes]
    count = min(len(paths), max(2, _STRIP_HEIGHT // max(height for _, height in rows)))
    chosen = [round(i * (len(paths) - 1) / max(1, count - 1)) for i in range(count)]
    strip = Image.new("RGB", (max(rows[i][0] for i in chosen), sum(rows[i][1] for i in chosen)), "white")
    top = 0
    for i in chosen:
        with Image.open(paths[i]) as picture:
            strip.paste(picture.convert("RGB").resize(rows[i], Image.Resampling.LANCZOS), (0, top))
        top += rows[i][1]
    target = samples / "strip.png"
    write_png(strip, target)
    return target


def write_png(picture: Image.Image, path: Path) -> None:
    """Write a PNG so that nobody sees half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    atomic.write_bytes(path, buffer.getvalue())
