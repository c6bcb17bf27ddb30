"""Heads from products to attention in one pass: low-rank addend, norm, RoPE, joining of streams; and back.

Apart, these are several passes over memory each way, complex tables make a compiler fall back to a kernel for
every step, and it makes the gradient of a joint product from those of its parts by copying them beside each
other. Here everything is written where it belongs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trainer.modeling.adapter.low_rank import add_low_rank, of_ups, side_by_side
from trainer.modeling.fused.norms import unit_of

if torch.version.cuda is not None:
    from trainer.modeling.triton import norm_rotary as kernels


class Stream(NamedTuple):
    """One stream of tokens: its heads, or (QKV) the joint product of its queries, keys and values."""

    values: torch.Tensor
    """(batch, tokens, heads, width), or (batch, tokens, 3 * heads * width): queries, keys and values of all
    heads beside each other. The width is a power of two."""
    weights: tuple[torch.Tensor, ...]
    """Of the norm, (width,): one, or those of queries and keys."""
    tables: tuple[torch.Tensor, ...]
    """How tokens turn, (tokens, width) fp32: one table with cosines in columns 2 i and sines in 2 i + 1, or
    one with cosines and one with sines, both in columns 2 i, whose other columns do not count."""
    hidden: torch.Tensor | None = None
    """(batch, tokens, all ranks): what is added to a joint product, see `low_rank.add_low_rank`."""
    ups: tuple[torch.Tensor, ...] = ()
    """Of queries, keys and values."""


def norm_rotary(streams: Sequence[Stream], eps: float) -> tuple[torch.Tensor, ...]:
    """Heads of one or two streams, each divided by its rms, weighed, and turned by its token; of joint
    products queries and keys so, and values as they are. All are (batch, tokens, heads, width), with the
    first stream's tokens first.

    Values 2 i and 2 i + 1 of a head are real and imaginary part of what is multiplied by cos_i + sin_i j, in
    fp32; results have the values' type. They are contiguous, but for attention's values of one stream, which
    are a view. What is added to two products is added in the same pass, in fp32, where kernels can: for bf16,
    ranks up to `MOST_RANK` of the kernels and `ups` of one shape. Values, `hidden` and `ups` have gradients.
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
    """True if the LoRA delta of each stream can be added in the same pass."""
    if len(streams) == 1 or streams[0].values.device.type == "cpu":
        return len(streams) == 2
    return all(
        all(part.dtype == torch.bfloat16 for part in (one.values, one.hidden, *one.ups) if part is not None)
        and all(up.shape == one.ups[0].shape for up in one.ups)
        and one.ups[0].shape[1] <= kernels.MOST_RANK
        for one in streams
    )


class _NormRotary(torch.autograd.Function):
    """A sum with what is added is not kept: backward makes it once more."""

    @staticmethod
    def forward(
        ctx: Any, eps: float, count: int, norms: int, turns: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ends = count, count * (1 + norms), count * (1 + norms + turns)
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


# the same in plain torch, with tensors as the kernels take them: `low` has hidden and a joint `up` a stream


def _per_stream(
    values: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    low: Sequence[torch.Tensor],
) -> list[tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor], Sequence[torch.Tensor]]]:
    """Of each stream: its heads, or queries, keys and values with what is added; weights of their norms, and
    tables.
    """
    found, count = [], len(values)
    for number, whole in enumerate(values):
        own = weights[number * len(weights) // count :][: len(weights) // count]
        turns = tables[number * len(tables) // count :][: len(tables) // count]
        if low:
            hidden, up = low[2 * number : 2 * number + 2]
            whole = whole + (hidden.flatten(0, 1) @ up.t()).view(whole.shape)
        found.append((_apart(whole, len(own[0])) if len(own) == 2 else (whole,), own, turns))
    return found


def _apart(wide: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Views of queries, keys and values, (batch, tokens, heads, width)."""
    return wide.unflatten(-1, (3, -1, width)).unbind(2)


def _forward(
    values: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    low: Sequence[torch.Tensor],
    eps: float,
) -> list[torch.Tensor]:
    found = []
    for heads, own, turns in _per_stream(values, weights, tables, low):
        turned = []
        for one, weight in zip(heads, own, strict=False):
            real, imaginary = _pairs(unit_of(one, eps)[0] * weight.float())
            cos, sin = _cos_sin(turns)
            turned.append(
                _whole(real * cos - imaginary * sin, imaginary * cos + real * sin).to(values[0].dtype)
            )
        found.append([*turned, *heads[len(own) :]])
    return found[0] if len(found) == 1 else [torch.cat(both, dim=1) for both in zip(*found, strict=True)]


def _backward(
    gradients: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    low: Sequence[torch.Tensor],
    eps: float,
) -> list[torch.Tensor]:
    """The gradients of `_forward` for `values`, contiguous, and for each `hidden`."""
    found, start = [], 0
    for heads, own, turns in _per_stream(values, weights, tables, low):
        end = start + heads[0].shape[1]
        given = [one[:, start:end] for one in gradients]
        start, cos, sin = end, *_cos_sin(turns)
        for which, weight in enumerate(own):
            real, imaginary = _pairs(given[which].float())
            back = _whole(real * cos + imaginary * sin, imaginary * cos - real * sin) * weight.float()
            unit, inverse = unit_of(heads[which], eps)
            mean = (back * unit).mean(-1, keepdim=True)
            given[which] = ((back - unit * mean) * inverse).to(values[0].dtype)
        found.append(torch.stack(given, dim=2).flatten(2) if len(own) == 2 else given[0])
    rows = [of.flatten(0, 1) @ up for of, up in zip(found, low[1::2], strict=False)]
    return found + [one.view(hidden.shape) for one, hidden in zip(rows, low[::2], strict=True)]


def _cos_sin(tables: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every pair, (tokens, 1, width / 2)."""
    even, odd = _pairs(tables[0][:, None])
    return even, odd if len(tables) == 1 else _pairs(tables[1][:, None])[0]


def _pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    real, imaginary = values.unflatten(-1, (-1, 2)).unbind(-1)
    return real, imaginary


def _whole(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    return torch.stack((real, imaginary), dim=-1).flatten(-2)
