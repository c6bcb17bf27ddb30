"""Heads from QKV projections to attention in one pass: LoRA delta, RMSNorm, RoPE, joining of streams.

One after the other, these steps are several passes over memory, forward and backward. Complex RoPE tables
make a compiler fall back to a kernel for every step, and it makes the gradient of a joint QKV projection by
copying the gradients of queries, keys and values beside each other. Here every result is written in its final
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trainer.modeling.adapter.low_rank import add_low_rank, of_ups, side_by_side
from trainer.modeling.fused.norms import unit_gradient, unit_of

if torch.version.cuda is not None:
    from trainer.modeling.triton import norm_rotary as kernels

Tensors = Sequence[torch.Tensor]


class Stream(NamedTuple):
    """One stream of tokens: its heads, or (QKV) the joint product of its queries, keys and values."""

    values: torch.Tensor
    """(batch, tokens, heads, width), or (batch, tokens, 3 * heads * width): queries, keys and values of all
    heads beside each other. The width is a power of two."""
    weights: tuple[torch.Tensor, ...]
    """Weights of the RMSNorm, (width,): one, or one for queries and one for keys."""
    tables: tuple[torch.Tensor, ...]
    """RoPE, (tokens, width) fp32: one table with cosines in columns 2 i and sines in columns 2 i + 1, or
    a table of cosines and a table of sines, both in columns 2 i; their other columns are not read."""
    hidden: torch.Tensor | None = None
    """Outputs of the LoRA A of a joint product, (batch, tokens, all ranks): see `low_rank.add_low_rank`."""
    ups: tuple[torch.Tensor, ...] = ()
    """LoRA B of queries, keys and values, (heads * width, rank) each."""


def norm_rotary(streams: Sequence[Stream], eps: float) -> tuple[torch.Tensor, ...]:
    """RMSNorm and RoPE of the heads of one or two streams, the first stream's tokens first.

    Streams of heads give one tensor; streams of joint products give queries, keys and values, of which the
    values are neither normed nor rotated. All results are (batch, tokens, heads, width) of the values' type,
    and contiguous, except for the attention values of a single stream, which are a view of its product.

    RoPE multiplies the complex number of values 2 i and 2 i + 1 of a head by cos_i + sin_i j, in fp32. The
    LoRA deltas of two products are added in the same pass, in fp32, where the kernels can do that: bf16,
    ranks up to their `MOST_RANK`, `ups` of one shape. `values`, `hidden` and `ups` have gradients.
    """
    if streams[0].hidden is not None and not _is_added_here(streams):
        streams = [
            Stream(add_low_rank(one.values, one.hidden, *one.ups), one.weights, one.tables)
            for one in streams
            if one.hidden is not None
        ]
    weights = [weight for one in streams for weight in one.weights]
    tables = [table for one in streams for table in one.tables]
    low = [one.hidden for one in streams if one.hidden is not None]
    low += [up for one in streams for up in one.ups]
    values = [one.values for one in streams]
    counts = len(streams), len(streams[0].weights), len(streams[0].tables)
    found: tuple[torch.Tensor, ...] = _NormRotary.apply(eps, *counts, *values, *weights, *tables, *low)
    return found


def _is_added_here(streams: Sequence[Stream]) -> bool:
    """True where the same pass can add the LoRA deltas of the streams."""
    if len(streams) == 1 or streams[0].values.device.type == "cpu":
        return len(streams) == 2
    return all(
        all(part.dtype == torch.bfloat16 for part in (one.values, one.hidden, *one.ups) if part is not None)
        and all(up.shape == one.ups[0].shape for up in one.ups)
        and one.ups[0].shape[1] <= kernels.MOST_RANK
        for one in streams
    )


class _NormRotary(torch.autograd.Function):
    """Backward adds the LoRA deltas again: the sums are not kept."""

    @staticmethod
    def forward(
        ctx: Any, eps: float, count: int, norms: int, rope: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ends = count, count * (1 + norms), count * (1 + norms + rope)
        values, weights, tables = tensors[: ends[0]], tensors[ends[0] : ends[1]], tensors[ends[1] : ends[2]]
        hiddens, ups = tensors[ends[2] : ends[2] + count], tensors[ends[2] + count :]
        blocks = [ups[3 * number : 3 * number + 3] for number in range(len(hiddens))]
        low = [
            one for hidden, own in zip(hiddens, blocks, strict=True) for one in (hidden, side_by_side(own))
        ]
        ctx.save_for_backward(*values, *weights, *tables, *low)
        ctx.eps, ctx.ends, ctx.shapes = eps, ends, [[tuple(up.shape) for up in own] for own in blocks]
        if values[0].device.type == "cpu":
            return tuple(_forward(values, weights, tables, low, eps))
        found = kernels.norm_rotary(values, weights, tables, low, eps)
        if norms == 2 and count == 1:
            return *found, _apart(values[0], len(weights[0]))[2]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, (first, second, third) = ctx.saved_tensors, ctx.ends
        values, weights, tables, low = saved[:first], saved[first:second], saved[second:third], saved[third:]
        if gradients[0].device.type != "cpu":
            found = kernels.norm_rotary_backward(gradients, values, weights, tables, low, ctx.eps)
        else:
            found = _backward(gradients, values, weights, tables, low, ctx.eps)
        ups = [
            up
            for of, hidden, shapes in zip(found, low[::2], ctx.shapes, strict=False)
            for up in of_ups(of.flatten(0, 1), hidden.flatten(0, 1), shapes)
        ]
        return *(None,) * 4, *found[:first], *(None,) * (third - first), *found[first:], *ups


# the kernels' arithmetic in plain torch; `low` has `hidden` and one block diagonal `up` for each stream


def _per_stream(
    values: Tensors, weights: Tensors, tables: Tensors, low: Tensors
) -> list[tuple[Tensors, Tensors, Tensors]]:
    """Each stream's heads, or its queries, keys and values with the LoRA delta added; the weights of their
    norms; and the RoPE tables.
    """
    found: list[tuple[Tensors, Tensors, Tensors]] = []
    count = len(values)
    for number, whole in enumerate(values):
        own = weights[number * len(weights) // count :][: len(weights) // count]
        rope = tables[number * len(tables) // count :][: len(tables) // count]
        if low:
            hidden, up = low[2 * number : 2 * number + 2]
            whole = whole + (hidden.flatten(0, 1) @ up.t()).view(whole.shape)
        found.append((_apart(whole, len(own[0])) if len(own) == 2 else (whole,), own, rope))
    return found


def _apart(wide: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Views of queries, keys and values, (batch, tokens, heads, width)."""
    return wide.unflatten(-1, (3, -1, width)).unbind(2)


def _forward(
    values: Tensors, weights: Tensors, tables: Tensors, low: Tensors, eps: float
) -> list[torch.Tensor]:
    found = []
    for heads, own, rope in _per_stream(values, weights, tables, low):
        rotated = [
            _rotated(unit_of(one, eps)[0] * weight.float(), rope).to(one.dtype)
            for one, weight in zip(heads, own, strict=False)
        ]
        found.append([*rotated, *heads[len(own) :]])
    return found[0] if len(found) == 1 else [torch.cat(both, dim=1) for both in zip(*found, strict=True)]


def _backward(
    gradients: Tensors, values: Tensors, weights: Tensors, tables: Tensors, low: Tensors, eps: float
) -> list[torch.Tensor]:
    """The gradients of `_forward` for `values`, contiguous, and for each `hidden`."""
    found, start = [], 0
    for heads, own, rope in _per_stream(values, weights, tables, low):
        end = start + heads[0].shape[1]
        given = [one[:, start:end] for one in gradients]
        start = end
        for which, weight in enumerate(own):
            back = _rotated(given[which].float(), rope, back=True) * weight.float()
            given[which] = unit_gradient(back, heads[which], eps)
        found.append(torch.stack(given, dim=2).flatten(2) if len(own) == 2 else given[0])
    rows = [of.flatten(0, 1) @ up for of, up in zip(found, low[1::2], strict=False)]
    return found + [one.view(hidden.shape) for one, hidden in zip(rows, low[::2], strict=True)]


def _rotated(values: torch.Tensor, tables: Tensors, *, back: bool = False) -> torch.Tensor:
    """fp32 heads (batch, tokens, heads, width) rotated by their tokens' angles, or `back`."""
    real, imaginary = _pairs(values)
    cos, sin = _pairs(tables[0][:, None])
    if len(tables) == 2:
        sin = _pairs(tables[1][:, None])[0]
    if back:
        sin = -sin
    return torch.stack((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1).flatten(-2)


def _pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Real and imaginary parts, (..., width / 2)."""
    real, imaginary = values.unflatten(-1, (-1, 2)).unbind(-1)
    return real, imaginary
