"""Streams of tokens as plain tuples, for the tests of what norms and turns their heads."""

from __future__ import annotations

import torch

from trainer.modeling.fused import norm_rotary as fused
from trainer.modeling.fused.norm_rotary import Stream

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Heads, the weight of their norm, and one table or two."""
WidePart = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""A joint product, the weights of the queries' norm and the keys', and one table or two."""
LowRank = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
"""A low-rank addend of a joint product: `hidden`, and the `ups` of queries, keys and values."""


def norm_rotary(first: Part, second: Part | None, eps: float) -> torch.Tensor:
    """Heads of all tokens, those of `first` first."""
    parts = [one for one in (first, second) if one is not None]
    streams = [Stream(values, (weight,), _given(cos, sin)) for values, weight, cos, sin in parts]
    (found,) = fused.norm_rotary(streams, eps)
    return found


def wide_norm_rotary(
    first: WidePart, second: WidePart | None, eps: float, added: tuple[LowRank, LowRank] | None = None
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of all tokens."""
    parts = [one for one in (first, second) if one is not None]
    streams = [Stream(wide, (query, key), _given(cos, sin)) for wide, query, key, cos, sin in parts]
    if added is not None:
        streams = [Stream(*one[:3], *low) for one, low in zip(streams, added, strict=True)]
    return fused.norm_rotary(streams, eps)


def _given(cos: torch.Tensor, sin: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return (cos,) if sin is None else (cos, sin)
