"""Triton kernel for CUDA: the root-mean-square norm of heads, and its gradient.

Imported only where torch was built for CUDA. A row is one head of one token, WIDTH values in one piece;
program i does ROWS of them, of batch * tokens * heads in that order:

    values    row at sample * stride_batch + token * stride_token + head * stride_head
    gradient  row at row * WIDTH, of the norm's result; only for BACKWARD, which gives that of `values`
    result    row at row * WIDTH
    weight    WIDTH values, the same for every row
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

# rows that one program holds, forward and backward
_FORWARD, _BACKWARD = 32, 16


@triton_op("trainer::head_norm", mutates_args={})
def head_norm(
    values: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """See `norms.head_norm`; with the contiguous `gradient` of that, the one of its values.

    values (batch, tokens, heads, width) of any strides but the last, which is 1.
    """
    batch, tokens, heads, width = values.shape
    result = torch.empty((batch, tokens, heads, width), dtype=values.dtype, device=values.device)
    rows, together = batch * tokens * heads, _FORWARD if gradient is None else _BACKWARD
    wrap_triton(_head_norm)[(triton.cdiv(rows, together),)](
        values if gradient is None else gradient, values, weight, result, rows, tokens, heads,
        values.stride(0), values.stride(1), values.stride(2),
        EPS=eps, WIDTH=width, ROWS=together, BACKWARD=gradient is not None, num_warps=4,
    )  # fmt: skip
    return result


@triton.jit
def _head_norm(  # type: ignore[no-untyped-def]
    gradient, values, weight, result, rows, tokens, heads, stride_batch, stride_token, stride_head,
    EPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    token = row // heads
    start = (token // tokens) * stride_batch + (token % tokens) * stride_token + (row % heads) * stride_head
    column = tl.arange(0, WIDTH)[None, :]
    value = tl.load(values + start[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + EPS)[:, None]
    unit = value * inverse
    if BACKWARD:
        given = tl.load(gradient + row[:, None] * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        given *= tl.load(weight + column).to(tl.float32)
        mean = tl.sum(given * unit, 1)[:, None] / WIDTH
        found = (given - unit * mean) * inverse
    else:
        found = unit * tl.load(weight + column).to(tl.float32)
    tl.store(result + row[:, None] * WIDTH + column, found, mask=inside)
