"""Triton kernels for CUDA that norm and turn the heads of one or two streams of tokens, in one pass.

Imported as `kernels` is, and for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from trainer.modeling.triton.heads import place_of, turn, turn_back

# values of one head that a program holds, and heads that it takes one after the other, at most
_VALUES, _MOST_HEADS = 2048, 8


@triton_op("trainer::norm_rotary", mutates_args={})
def norm_rotary(
    first: torch.Tensor,
    first_weight: torch.Tensor,
    first_cos: torch.Tensor,
    first_sin: torch.Tensor | None,
    second: torch.Tensor | None,
    second_weight: torch.Tensor | None,
    second_cos: torch.Tensor | None,
    second_sin: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See `rotary.norm_rotary`; tables have one stride, and rows at multiples of 16 bytes."""
    batch, tokens, heads, width = first.shape
    streams = _stream(first, first_weight, first_cos, first_sin)
    streams += streams if second is None else _stream(second, second_weight, second_cos, second_sin)
    if second is not None:
        tokens = tokens + second.shape[1]
    result = torch.empty((batch, tokens, heads, width), dtype=first.dtype, device=first.device)
    grid, sizes = tiles(first, second)
    wrap_triton(_norm_rotary)[grid](
        result,
        heads,
        *streams,
        row_stride(first_cos, first_sin, second_cos, second_sin),
        EPS=eps,
        SPLIT=first_sin is not None,
        **sizes,
        num_warps=4,
    )
    return result


@triton_op("trainer::norm_rotary_backward", mutates_args={})
def norm_rotary_backward(
    gradient: torch.Tensor,
    first: torch.Tensor,
    first_weight: torch.Tensor,
    first_cos: torch.Tensor,
    first_sin: torch.Tensor | None,
    second: torch.Tensor | None,
    second_weight: torch.Tensor | None,
    second_cos: torch.Tensor | None,
    second_sin: torch.Tensor | None,
    eps: float,
) -> list[torch.Tensor]:
    """The gradients of `norm_rotary` for its parts' values, contiguous."""
    gradient = aligned(gradient)
    streams = _stream(first, first_weight, first_cos, first_sin)
    streams += streams if second is None else _stream(second, second_weight, second_cos, second_sin)
    given = [first] if second is None else [first, second]
    results = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in given]
    grid, sizes = tiles(first, second)
    wrap_triton(_norm_rotary_backward)[grid](
        gradient,
        *gradient.stride()[:3],
        results[0],
        gradient if second is None else results[1],
        first.shape[2],
        *streams,
        row_stride(first_cos, first_sin, second_cos, second_sin),
        EPS=eps,
        SPLIT=first_sin is not None,
        **sizes,
        num_warps=4,
    )
    return results


def _stream(
    values: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None
) -> tuple[Any, ...]:
    """A part as the kernels take it: its tensors, number of tokens, and strides of the values."""
    assert weight is not None and cos is not None
    values = aligned(values)
    return (values, weight, cos, cos if sin is None else sin, values.shape[1], *values.stride()[:3])


def aligned(values: torch.Tensor) -> torch.Tensor:
    """`values` where each row lies in one piece from a multiple of 8 values on, else a copy."""
    *strides, last = values.stride()
    if last == 1 and all(place % 8 == 0 for place in (*strides, values.storage_offset())):
        return values
    return values.contiguous()


def row_stride(*tables: torch.Tensor | None) -> int:
    """How far the rows of all tables are apart; where a table has a single row, its stride means nothing."""
    given = [table for table in tables if table is not None]
    first, *others = [table.stride() for table in given if table.shape[0] > 1] or [given[0].stride()]
    assert first[1] == 1 and first[0] % 4 == 0 and all(other == first for other in others)
    return first[0]


def tiles(
    first: torch.Tensor, second: torch.Tensor | None, rows: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """The kernels' grid and sizes; `rows` are tokens of a program where not its values decide."""
    batch, tokens, heads, width = first.shape
    together = next(count for count in range(_MOST_HEADS, 0, -1) if heads % count == 0)
    rows = rows or _VALUES // width
    blocks = triton.cdiv(tokens, rows)
    if second is not None:
        blocks = blocks + triton.cdiv(second.shape[1], rows)
    sizes = {"JOINED": second is not None, "WIDTH": width, "TOKENS": rows, "HEADS": together}
    return (batch * blocks * (heads // together),), sizes


@triton.jit
def _norm_rotary(  # type: ignore[no-untyped-def]
    result,
    heads,
    first,
    first_weight,
    first_cos,
    first_sin,
    first_tokens,
    first_batch,
    first_token,
    first_head,
    second,
    second_weight,
    second_cos,
    second_sin,
    second_tokens,
    second_batch,
    second_token,
    second_head,
    rows,
    EPS: tl.constexpr,
    JOINED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    sample, head, block, blocks = place_of(heads, first_tokens, second_tokens, JOINED, TOKENS, HEADS)
    start = sample * first_tokens * heads
    if JOINED:
        start += sample * second_tokens * heads
    result += (start + head) * WIDTH
    if block < blocks:
        first += sample * first_batch + head * first_head
        part = (first, first_weight, first_cos, first_sin, first_tokens, first_token, first_head)
        turn(part, None, rows, result, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS, 0)
    elif JOINED:
        # another name: what both branches assign would have to be of one type, and lengths differ in theirs
        second += sample * second_batch + head * second_head
        other = (second, second_weight, second_cos, second_sin, second_tokens, second_token, second_head)
        result += first_tokens * heads * WIDTH
        turn(other, None, rows, result, block - blocks, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS, 0)


@triton.jit
def _norm_rotary_backward(  # type: ignore[no-untyped-def]
    gradient,
    gradient_batch,
    gradient_token,
    gradient_head,
    of_first,
    of_second,
    heads,
    first,
    first_weight,
    first_cos,
    first_sin,
    first_tokens,
    first_batch,
    first_token,
    first_head,
    second,
    second_weight,
    second_cos,
    second_sin,
    second_tokens,
    second_batch,
    second_token,
    second_head,
    rows,
    EPS: tl.constexpr,
    JOINED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    sample, head, block, blocks = place_of(heads, first_tokens, second_tokens, JOINED, TOKENS, HEADS)
    gradient += sample * gradient_batch + head * gradient_head
    if block < blocks:
        given = (gradient, gradient_token, gradient_head)
        first += sample * first_batch + head * first_head
        part = (first, first_weight, first_cos, first_sin, first_tokens, first_token, first_head)
        of_first += (sample * first_tokens * heads + head) * WIDTH
        turn_back(part, None, None, rows, given, of_first, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS, 0)
    elif JOINED:
        given = (gradient + first_tokens * gradient_token, gradient_token, gradient_head)
        second += sample * second_batch + head * second_head
        other = (second, second_weight, second_cos, second_sin, second_tokens, second_token, second_head)
        of_second += (sample * second_tokens * heads + head) * WIDTH
        block -= blocks
        turn_back(
            other, None, None, rows, given, of_second, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS, 0
        )
