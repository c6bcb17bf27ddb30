"""The work of one forward pass, from which its time is predicted. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.schema import RunConfig
from trainer.families.family import Family
from trainer.families.values import Shape
from trainer.planning.shapes.adapters import TEXT_SIDE
from trainer.planning.shapes.blocks import linear_blocks
from trainer.planning.shapes.geometry import ComponentGeometry, Geometry
from trainer.planning.shapes.mix import USUAL_PICTURES, Captions, Pictures, usual_parts
from trainer.planning.shapes.shape_classes import matmul_shape_class, shape_class

# captions of 1 to 300 tokens, as many short as long by their logarithm: 104 on average when they are padded
_CAPTION_TOKENS = 104
# of families whose text encoder sees the images too, one of 384 x 384 pixels among them
_CAPTION_TOKENS_WITH_IMAGES = 384


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The shapes of samples, as far as they are known."""

    caption_tokens: int | None = None
    """Tokens of every caption, with pictures of one shape; None: a usual mix of lengths."""
    pictures: Pictures = ()
    """How many pictures have each shape; empty: six shapes, as many of each."""


USUAL_MIX = Mix()


def with_work(
    geometry: Geometry,
    family: Family,
    config: RunConfig,
    model_config: Mapping[str, Any],
    trained: ComponentGeometry,
    shape: Shape,
    mix: Mix,
) -> Geometry:
    """The geometry with the work of a batch whose samples are of the shapes of `mix`, of `shape` at most."""
    usual, caption_tokens = shape, mix.caption_tokens
    if family.caption is not None:
        mixed = _CAPTION_TOKENS_WITH_IMAGES if family.text_sees_controls else _CAPTION_TOKENS
        tokens = min(shape.text_tokens, mixed if caption_tokens is None else caption_tokens)
        usual = dataclasses.replace(shape, text_tokens=tokens)
    longest, attention = (family.attention_shape(model_config, one) for one in (shape, usual))
    every, text = attention.batch_size * attention.tokens, usual.batch_size * usual.text_tokens
    blocks, flops = _block_parameters(trained, family.high_precision), 0.0
    for textual, others, _ in blocks:
        flops += 2.0 * text * textual
        flops += 2.0 * (every - text if textual else every) * others
    # a block of text alone has no attention of its own
    calls = sum(1 for _, others, _ in blocks if others)
    width = attention.heads * attention.head_width
    pairs = attention.batch_size * attention.tokens * (attention.reach or attention.tokens)
    drawn = caption_tokens is None
    parts, alike, padded = micro_batches(family, config, mix.pictures) if drawn else ((), (), ())
    return dataclasses.replace(
        geometry,
        attention_shape_class=shape_class(longest),
        matmul_shape_class=matmul_shape_class(longest),
        matmul_flops=flops,
        attention_flops=4.0 * pairs * width * calls,
        attention_calls=calls,
        products=sum(linears for _, _, linears in blocks),
        blocks=len(blocks),
        usual_share=attention.tokens / longest.tokens,
        usual_parts=parts,
        usual_parts_alike=alike,
        usual_parts_padded=padded,
        pictures_known=bool(parts and mix.pictures),
    )


Parts = tuple[float, ...]
"""Micro-batches of one, two ... of a batch's samples, on average."""


def micro_batches(family: Family, config: RunConfig, pictures: Pictures) -> tuple[Parts, Parts, Parts]:
    """Parts of a batch with captions as they are, of one length, and padded to a few lengths.

    `pictures` says how many have each shape; else there are six. Empty where samples are packed into rows.
    """
    if family.packed_by is not None:
        return (), (), ()
    size, steps = config.train.train_batch_size, config.train.gradient_accumulation_steps

    def parts(captions: Captions) -> Parts:
        most, known = config.data.max_sequence_length, pictures or USUAL_PICTURES
        found = usual_parts(size, size * steps, captions=captions, pictures=known, most_tokens=most)
        return tuple(one / steps for one in found)

    alike = parts("alike")
    if family.caption is None:
        return alike, alike, alike
    written = parts("as they are")
    return written, alike, parts("padded") if config.features.text_padding is not False else written


@functools.lru_cache(maxsize=64)
def _block_parameters(
    trained: ComponentGeometry, high_precision: tuple[str, ...]
) -> tuple[tuple[int, int, int], ...]:
    """(parameters of linears that see the caption's tokens only, of the others, linears) of each block."""
    found = []
    for linears in linear_blocks(trained.quantized(high_precision)).values():
        sizes = {name: math.prod(size) for name, size in linears.items()}
        textual = sum(size for name, size in sizes.items() if TEXT_SIDE.search(name))
        found.append((textual, sum(sizes.values()) - textual, len(sizes)))
    return tuple(found)
