"""One micro-batch: read from the cache, drawn for, moved to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from trainer.engine.caching.entries import Entries
from trainer.engine.context import Context
from trainer.families import losses
from trainer.families.family import Family
from trainer.families.values import ON_HOST, TEXT_MASK, Batch, Draw, Shape
from trainer.modeling.attention.text_lengths import pad_text
from trainer.planning.shapes.mix import padded_length, padded_row


def load_batch(
    context: Context,
    entries: Entries,
    samples: Sequence[tuple[int, bool]],
    *,
    pin_memory: bool,
    text_padding: bool = False,
) -> Batch:
    """One batch of samples (record, caption dropped) on the CPU; text values in the model's type.

    With `text_padding` captions are padded to a few lengths, and the batch has their mask; a packed row is
    padded to that of a whole micro-batch.
    """
    cache, family = entries.cache, context.family
    text = [cache.read("text", (entries.empties if drop else entries.texts)[i].key) for i, drop in samples]
    packed = family.packed_by is not None
    if text_padding and not packed:
        assert family.caption is not None, "a family whose captions are padded as they are encoded"
        for number, row in enumerate(text):
            caption = row[family.caption]
            padded, mask = pad_text(caption, padded_length(len(caption)))
            text[number] = {**row, family.caption: padded, TEXT_MASK: mask}
    latents = [
        losses.weighed(
            cache.read("latents", entries.latents[i].key),
            entries.latents[i].record.loss_weight if entries.weighted else None,
            masked=entries.masked,
        )
        for i, _ in (samples if entries.latents else ())
    ]
    batch = family.collate(text, latents)
    if text_padding and packed:
        assert family.pad_row is not None, "a family whose rows are not padded"
        batch = family.pad_row(batch, row_tokens(context))
    ready: list[dict[str, torch.Tensor]] = []
    for tensors, dtype in ((batch.latents, torch.float32), (batch.text, context.dtype)):
        cast = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
        ready.append({name: one.pin_memory() for name, one in cast.items()} if pin_memory else cast)
    return dataclasses.replace(batch, latents=ready[0], text=ready[1])


def row_tokens(context: Context) -> int:
    """Tokens of a micro-batch of padded rows, which are one row."""
    return context.plan.micro_batch_size * padded_row(context.config.data.max_sequence_length)


def draw_for(family: Family, batch: Batch, settings: Any, positions: Sequence[int]) -> Draw | None:
    """Noise, timesteps and dropout flags of a batch whose samples have these positions, on the CPU."""
    header = {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}
    return family.draw(settings, positions, header)


def synthetic(context: Context, shape: Shape, seed: int, position: int) -> tuple[Batch, Draw | None]:
    """A random batch of a shape on the device, drawn for as samples from `position` on."""
    family = context.family
    config = context.source.component_config(family.trained_component)
    batch = family.synthetic_batch(config, shape, seed)
    draw = draw_for(family, batch, context.settings, range(position, position + shape.batch_size))
    return to_device(batch, draw, context.device, context.dtype)


def to_device(batch: Batch, draw: Draw | None, device: str, dtype: torch.dtype) -> tuple[Batch, Draw | None]:
    """Move a batch (text in the model's dtype) and its draw (fp32); waits only where memory is not pinned."""
    batch = dataclasses.replace(
        batch,
        latents={name: tensor.to(device, non_blocking=True) for name, tensor in batch.latents.items()},
        text={
            name: tensor.to(
                "cpu" if name in ON_HOST else device,
                dtype if tensor.is_floating_point() else tensor.dtype,
                non_blocking=True,
            )
            for name, tensor in batch.text.items()
        },
    )
    if draw is not None:
        draw = Draw(**{name: one.to(device, non_blocking=True) for name, one in vars(draw).items()})
    return batch, draw
