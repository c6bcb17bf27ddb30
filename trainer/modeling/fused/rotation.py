"""The norm of heads with their rotation in plain torch: what the kernels for it compute."""

from __future__ import annotations

import torch

from trainer.modeling.fused.norms import unit_of

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""A stream: values (batch, tokens, heads, width), weight (width,), and how tokens turn, (tokens, width) fp32.

That is one table with cosines in columns 2 i and sines in columns 2 i + 1, and None; or one with cosines and
one with sines, both in columns 2 i, whose other columns do not count.
"""


def turned(part: Part, eps: float) -> torch.Tensor:
    """`rotary.norm_rotary` of one part."""
    values, weight, cos, sin = part
    real, imaginary = _pairs(unit_of(values, eps)[0] * weight.float())
    cos, sin = _turns(cos, sin)
    return _whole(real * cos - imaginary * sin, imaginary * cos + real * sin).to(values.dtype)


def turned_back(gradient: torch.Tensor, part: Part, eps: float) -> torch.Tensor:
    """The gradient of `turned` for its values."""
    values, weight, cos, sin = part
    real, imaginary = _pairs(gradient.float())
    cos, sin = _turns(cos, sin)
    given = _whole(real * cos + imaginary * sin, imaginary * cos - real * sin) * weight.float()
    unit, inverse = unit_of(values, eps)
    mean = (given * unit).mean(-1, keepdim=True)
    return ((given - unit * mean) * inverse).to(values.dtype)


def _turns(cos: torch.Tensor, sin: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every pair, (tokens, 1, width / 2)."""
    even, odd = _pairs(cos[:, None])
    return even, odd if sin is None else _pairs(sin[:, None])[0]


def _pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    real, imaginary = values.unflatten(-1, (-1, 2)).unbind(-1)
    return real, imaginary


def _whole(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    return torch.stack((real, imaginary), dim=-1).flatten(-2)
