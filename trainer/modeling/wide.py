"""Floor 4: queries, keys and values from a joint product to attention in one pass, and their gradients back.

A compiler makes the gradient of one tensor from those of its parts by copying them beside each other. Here
they are written where they belong at once, and so are the values of two streams of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.modeling.turns import turned, turned_back

if torch.version.cuda is not None:
    from trainer.modeling import kernels_wide

WidePart = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""A stream: queries, keys and values of all heads beside each other (batch, tokens, 3 * heads * width), the
weights of the queries' norm and the keys' (width,), and two tables as in `turns.Part`.
"""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def wide_norm_rotary(first: WidePart, second: WidePart | None, eps: float) -> Heads:
    """Queries and keys as `rotary.norm_rotary` computes them, and values, all (batch, tokens, heads, width).

    The tokens of `first` are first. Contiguous, but for the values of one stream: those are a view of it.
    """
    heads: Heads = _WideNormRotary.apply(*first, *(second or _NO_PART), eps)
    return heads


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
            query, key, *joined = kernels_wide.wide_norm_rotary(*parts, eps)
            return query, key, joined[0] if joined else _apart(first, len(first_query_weight))[2]
        streams = [_forward(part, eps) for part in _streams(parts)]
        if len(streams) == 1:
            return streams[0]
        query, key, value = (torch.cat(both, dim=1) for both in zip(*streams, strict=True))
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = ctx.saved_tensors
        if gradients[0].device.type != "cpu":
            found = kernels_wide.wide_norm_rotary_backward(*gradients, *parts, ctx.eps)
        else:
            found, start = [], 0
            for part in _streams(parts):
                end = start + part[0].shape[1]
                found.append(_backward([one[:, start:end] for one in gradients], part, ctx.eps))
                start = end
        nothing = (None, None, None, None)
        return found[0], *nothing, found[1] if len(found) == 2 else None, *nothing, None


def _streams(parts: tuple[Any, ...]) -> list[WidePart]:
    return [parts[:5]] if parts[5] is None else [parts[:5], parts[5:]]


def _apart(wide: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Views of queries, keys and values, (batch, tokens, heads, width)."""
    return wide.unflatten(-1, (3, -1, width)).unbind(2)


def _forward(part: WidePart, eps: float) -> Heads:
    """`wide_norm_rotary` of one stream."""
    wide, query_weight, key_weight, cos, sin = part
    query, key, value = _apart(wide, len(query_weight))
    return turned((query, query_weight, cos, sin), eps), turned((key, key_weight, cos, sin), eps), value


def _backward(gradients: list[torch.Tensor], part: WidePart, eps: float) -> torch.Tensor:
    """The gradient of `_forward` for its product, contiguous."""
    wide, query_weight, key_weight, cos, sin = part
    query, key, _ = _apart(wide, len(query_weight))
    of_query = turned_back(gradients[0], (query, query_weight, cos, sin), eps)
    of_key = turned_back(gradients[1], (key, key_weight, cos, sin), eps)
    return torch.stack((of_query, of_key, gradients[2]), dim=2).flatten(2)
