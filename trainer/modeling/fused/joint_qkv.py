"""Queries, keys and values from a joint product to attention in one pass, and their gradients back.

A compiler makes the gradient of one tensor from those of its parts by copying them beside each other. Here
they are written where they belong at once, and so are the values of two streams of tokens, for which the
adapters' products are added on the way too: a sum that is never stored is neither written nor read.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.modeling.adapter.low_rank import add_low_rank, of_ups, side_by_side
from trainer.modeling.fused.rotation import turned, turned_back

if torch.version.cuda is not None:
    from trainer.modeling.triton import joint_qkv

WidePart = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""A stream: queries, keys and values of all heads beside each other (batch, tokens, 3 * heads * width), the
weights of the queries' norm and the keys' (width,), and two tables as in `turns.Part`.
"""

LowRank = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
"""What is added to a stream, as `low_rank.add_low_rank` takes it: hidden (batch, tokens, all ranks), and the
`ups` of queries, keys and values.
"""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def wide_norm_rotary(
    first: WidePart, second: WidePart | None, eps: float, added: tuple[LowRank, LowRank] | None = None
) -> Heads:
    """Queries and keys as `rotary.norm_rotary` computes them, and values, all (batch, tokens, heads, width).

    The tokens of `first` are first. Contiguous, but for the values of one stream: those are a view of it.

    `added` is for two streams: each product is taken with its own added to it. Kernels do not round that sum.
    They do it for bf16, ranks up to their `MOST_RANK` and `ups` of one shape; else it is made before.
    """
    heads: Heads
    if added is not None:
        assert second is not None
        if _is_added_here(first, second, *added):
            (hidden, ups), (second_hidden, second_ups) = added
            heads = _AddNormRotary.apply(eps, *first, *second, hidden, second_hidden, *ups, *second_ups)
            return heads
        first, second = (
            (add_low_rank(part[0], low[0], *low[1]), *part[1:])
            for part, low in zip((first, second), added, strict=True)
        )
    heads = _WideNormRotary.apply(*first, *(second or _NO_PART), eps)
    return heads


def _is_added_here(first: WidePart, second: WidePart, *added: LowRank) -> bool:
    """Whether what is `added` to two streams can be added in the same pass."""
    if first[0].device.type == "cpu":
        return True
    tensors = (first[0], second[0], *(one for hidden, ups in added for one in (hidden, *ups)))
    return (
        all(one.dtype == torch.bfloat16 for one in tensors)
        and all(up.shape == ups[0].shape for _, ups in added for up in ups)
        and all(ups[0].shape[1] <= joint_qkv.MOST_RANK for _, ups in added)
    )


_NO_PART = (None, None, None, None, None)


class _WideNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        first: torch.Tensor,
        first_query_weight: torch.Tensor,
        first_key_weight: torch.Tensor,
        first_cos: torch.Tensor,
        first_sin: torch.Tensor | None,
        second: torch.Tensor | None,
        second_query_weight: torch.Tensor | None,
        second_key_weight: torch.Tensor | None,
        second_cos: torch.Tensor | None,
        second_sin: torch.Tensor | None,
        eps: float,
    ) -> Heads:
        parts = (
            *(first, first_query_weight, first_key_weight, first_cos, first_sin),
            *(second, second_query_weight, second_key_weight, second_cos, second_sin),
        )
        ctx.save_for_backward(*parts)
        ctx.eps = eps
        if first.device.type != "cpu":
            query, key, *joined = joint_qkv.wide_norm_rotary(*parts, eps)
            return query, key, joined[0] if joined else _apart(first, len(first_query_weight))[2]
        return _forward(_streams(parts), eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = ctx.saved_tensors
        if gradients[0].device.type != "cpu":
            found = joint_qkv.wide_norm_rotary_backward(*gradients, *parts, ctx.eps)
        else:
            found = _backward(gradients, _streams(parts), ctx.eps)
        nothing = (None, None, None, None)
        return found[0], *nothing, found[1] if len(found) == 2 else None, *nothing, None


class _AddNormRotary(torch.autograd.Function):
    """Of two streams with what is added to them. The sum is not kept, which backward makes once more."""

    @staticmethod
    def forward(ctx: Any, eps: float, *tensors: torch.Tensor) -> Heads:
        parts, hiddens, ups = tensors[:10], tensors[10:12], (tensors[12:15], tensors[15:])
        low = (hiddens[0], side_by_side(ups[0]), hiddens[1], side_by_side(ups[1]))
        ctx.save_for_backward(*parts, *low)
        ctx.eps, ctx.shapes = eps, [[tuple(up.shape) for up in one] for one in ups]
        if parts[0].device.type != "cpu":
            query, key, value = joint_qkv.wide_norm_rotary(*parts, eps, *low)
            return query, key, value
        return _forward(_with(_streams(parts), low), eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts, low = ctx.saved_tensors[:10], ctx.saved_tensors[10:]
        hiddens, blocks = low[::2], low[1::2]
        if gradients[0].device.type != "cpu":
            found = joint_qkv.wide_norm_rotary_backward(*gradients, *parts, ctx.eps, *low)
            found, of_hiddens = found[:2], found[2:]
        else:
            found = _backward(gradients, _with(_streams(parts), low), ctx.eps)
            rows = [one.flatten(0, 1) @ up for one, up in zip(found, blocks, strict=True)]
            of_hiddens = [one.view(hidden.shape) for one, hidden in zip(rows, hiddens, strict=True)]
        found_ups = [
            up
            for one, hidden, shapes in zip(found, hiddens, ctx.shapes, strict=True)
            for up in of_ups(one.flatten(0, 1), hidden.flatten(0, 1), shapes)
        ]
        nothing = (None, None, None, None)
        return None, found[0], *nothing, found[1], *nothing, *of_hiddens, *found_ups


def _with(streams: list[WidePart], low: tuple[torch.Tensor, ...]) -> list[WidePart]:
    """The streams with what is added to each, which `low` has as hidden and one `up` for all."""
    return [
        (part[0] + (hidden.flatten(0, 1) @ up.t()).view(part[0].shape), *part[1:])
        for part, hidden, up in zip(streams, low[::2], low[1::2], strict=True)
    ]


def _streams(parts: tuple[Any, ...]) -> list[WidePart]:
    return [parts[:5]] if parts[5] is None else [parts[:5], parts[5:]]


def _apart(wide: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Views of queries, keys and values, (batch, tokens, heads, width)."""
    return wide.unflatten(-1, (3, -1, width)).unbind(2)


def _forward(streams: list[WidePart], eps: float) -> Heads:
    """`wide_norm_rotary` in plain torch."""
    found = []
    for wide, query_weight, key_weight, cos, sin in streams:
        query, key, value = _apart(wide, len(query_weight))
        query = turned((query, query_weight, cos, sin), eps)
        found.append((query, turned((key, key_weight, cos, sin), eps), value))
    if len(found) == 1:
        return found[0]
    query, key, value = (torch.cat(both, dim=1) for both in zip(*found, strict=True))
    return query, key, value


def _backward(gradients: tuple[torch.Tensor, ...], streams: list[WidePart], eps: float) -> list[torch.Tensor]:
    """The gradients of `_forward` for its products, contiguous."""
    found, start = [], 0
    for wide, query_weight, key_weight, cos, sin in streams:
        query, key, _ = _apart(wide, len(query_weight))
        end = start + wide.shape[1]
        of_query, of_key, of_value = (one[:, start:end] for one in gradients)
        of_query = turned_back(of_query, (query, query_weight, cos, sin), eps)
        of_key = turned_back(of_key, (key, key_weight, cos, sin), eps)
        found.append(torch.stack((of_query, of_key, of_value), dim=2).flatten(2))
        start = end
    return found
