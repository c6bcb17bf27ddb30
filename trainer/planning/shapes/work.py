"""What one forward pass computes, for the prediction of its time. Imports no torch."""

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
from trainer.planning.shapes.blocks import BLOCK, LEAST_LINEARS
from trainer.planning.shapes.geometry import ComponentGeometry
from trainer.planning.shapes.mix import USUAL_PICTURES, Captions, Pictures, usual_parts
from trainer.planning.shapes.planned_adapter import TEXT_SIDE

# captions of 1 to 300 tokens, as many short as long by their logarithm: 104 on average when they are padded
_CAPTION_TOKENS = 104
# of families whose text encoder sees the images too, one of 384 x 384 pixels among them
_CAPTION_TOKENS_WITH_IMAGES = 384


@dataclass(frozen=True, kw_only=True)
class Work:
    """One forward pass of a micro-batch through the repeated blocks, with captions of usual length."""

    matmul_flops: float
    attention_flops: float
    attention_calls: int
    products: int
    """Linear layers."""
    blocks: int
    share: float
    """Its tokens, as a share of those with the longest captions."""
    pictures_known: bool = False
    """Whether `parts` are those of the run's pictures."""
    parts: tuple[float, ...] = ()
    """Micro-batches of one, two ... of its samples, on average; empty: it is one."""
    parts_alike: tuple[float, ...] = ()
    """The same with captions of one length."""
    parts_padded: tuple[float, ...] = ()
    """The same with captions padded to a few lengths."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Of what shapes samples are, as far as it is known."""

    caption_tokens: int | None = None
    """Of every caption, and pictures are of one shape; None: a usual mix of lengths."""
    pictures: Pictures = ()
    """Empty: of six shapes, as many of each."""


USUAL_MIX = Mix()


def usual_work(
    family: Family,
    config: RunConfig,
    model_config: Mapping[str, Any],
    trained: ComponentGeometry,
    shape: Shape,
    mix: Mix,
) -> Work:
    """The work of a batch whose samples are of these shapes."""
    caption_tokens = mix.caption_tokens
    if family.caption is not None:
        mixed = _CAPTION_TOKENS_WITH_IMAGES if family.text_sees_controls else _CAPTION_TOKENS
        tokens = min(shape.text_tokens, mixed if caption_tokens is None else caption_tokens)
        usual = dataclasses.replace(shape, text_tokens=tokens)
    else:
        usual = shape
    longest, attention = (family.attention_shape(model_config, one) for one in (shape, usual))
    linears = trained.quantized(family.high_precision)
    every, text = attention.batch_size * attention.tokens, usual.batch_size * usual.text_tokens
    flops, own = 0.0, 0
    blocks = block_linears(tuple(linears))
    for textual, others in blocks:
        rest = every - text if textual else every
        flops += 2.0 * text * sum(math.prod(linears[name]) for name in textual)
        flops += 2.0 * rest * sum(math.prod(linears[name]) for name in others)
        own += bool(others)
    width = attention.heads * attention.head_width
    pairs = attention.batch_size * attention.tokens * (attention.reach or attention.tokens)
    work = Work(
        matmul_flops=flops,
        attention_flops=4.0 * pairs * width * own,
        attention_calls=own,
        products=sum(len(textual) + len(others) for textual, others in blocks),
        blocks=len(blocks),
        share=attention.tokens / longest.tokens,
    )
    return parted(work, family, config, mix.pictures) if caption_tokens is None else work


def parted(work: Work, family: Family, config: RunConfig, pictures: Pictures) -> Work:
    """The work with samples as steps part them; `pictures` are those of each shape, else of six."""
    if family.packed_by is not None:
        return work
    size, steps = config.train.train_batch_size, config.train.gradient_accumulation_steps

    def parts(captions: Captions) -> tuple[float, ...]:
        found = usual_parts(
            size,
            size * steps,
            captions=captions,
            pictures=pictures or USUAL_PICTURES,
            most_tokens=config.data.max_sequence_length,
        )
        return tuple(one / steps for one in found)

    alike = parts("alike")
    written = alike if family.caption is None else parts("as they are")
    may_pad = family.caption is not None and config.features.text_padding is not False
    padded = parts("padded") if may_pad else written
    known = bool(pictures)
    return dataclasses.replace(
        work, parts=written, parts_alike=alike, parts_padded=padded, pictures_known=known
    )


@functools.lru_cache(maxsize=64)
def block_linears(names: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """(linears that see the caption's tokens only, the others) of each repeated block.

    A block is a numbered module with two linears at least.
    """
    blocks: dict[str, list[str]] = {}
    for name in names:
        found = BLOCK.match(name)
        if found is not None:
            blocks.setdefault(found[1], []).append(name)
    return tuple(
        (
            tuple(name for name in members if TEXT_SIDE.search(name)),
            tuple(name for name in members if not TEXT_SIDE.search(name)),
        )
        for members in blocks.values()
        if len(members) >= LEAST_LINEARS
    )
