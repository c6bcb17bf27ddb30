"""Floor 4: Triton kernels for CUDA that norm and turn the heads of one or two streams of tokens, in one pass.

A program takes a few tokens with several heads, which share the tokens' rows of the tables. Imported as
`kernels` is, and for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

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
    """How far the rows of all tables are apart."""
    first, *others = (table.stride() for table in tables if table is not None)
    assert first[1] == 1 and first[0] % 4 == 0 and all(other == first for other in others)
    return first[0]


def tiles(first: torch.Tensor, second: torch.Tensor | None) -> tuple[Any, dict[str, Any]]:
    """The kernels' grid and sizes."""
    batch, tokens, heads, width = first.shape
    together = next(count for count in range(_MOST_HEADS, 0, -1) if heads % count == 0)
    rows = _VALUES // width
    blocks = triton.cdiv(tokens, rows)
    if second is not None:
        blocks = blocks + triton.cdiv(second.shape[1], rows)
    sizes = {"JOINED": second is not None, "WIDTH": width, "TOKENS": rows, "HEADS": together}
    return (batch * blocks * (heads // together),), sizes


@triton.jit
def place_of(  # type: ignore[no-untyped-def]
    heads, first, second, JOINED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr
):
    """This program's sample, first head and block of tokens, and the number of the first part's blocks."""
    groups = heads // HEADS
    program = tl.program_id(0)
    blocks = tl.cdiv(first, TOKENS)
    every = blocks
    if JOINED:
        every += tl.cdiv(second, TOKENS)
    block = program // groups
    return (block // every).to(tl.int64), program % groups * HEADS, block % every, blocks


@triton.jit
def _pairs(rows):  # type: ignore[no-untyped-def]
    """(tokens, width) as two of (tokens, width / 2) in fp32, the values of each pair."""
    return tl.split(tl.reshape(rows.to(tl.float32), (rows.shape[0], rows.shape[1] // 2, 2)))


@triton.jit
def load_rows(start, place, inside):  # type: ignore[no-untyped-def]
    """Rows that begin at multiples of 16 bytes, which a compiler does not know of what torch made for it."""
    return tl.load(tl.multiple_of(start + place, (16, 16)), mask=inside, other=0.0)


@triton.jit
def _whole(real, imaginary):  # type: ignore[no-untyped-def]
    return tl.reshape(tl.join(real, imaginary), (real.shape[0], 2 * real.shape[1]))


@triton.jit
def _inverse(real, imaginary, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / rms of each row."""
    return tl.rsqrt(
        tl.sum(real * real + imaginary * imaginary, 1, keep_dims=True) / (2 * real.shape[1]) + EPS
    )


@triton.jit
def _tables(part, rows, token, column, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of each pair's two values, and cosines and sines, of these tokens.

    All are read as whole rows of the values' shape: loads of another shape would be laid out in another way.
    """
    _, weight, cos, sin, tokens, _, _ = part
    place, inside = token * rows + column, token < tokens
    of_real, of_imaginary = _pairs(tl.load(tl.broadcast_to(weight + column, place.shape)))
    even, odd = _pairs(load_rows(cos, place, inside))
    if SPLIT:
        odd, _ = _pairs(load_rows(sin, place, inside))
    return of_real, of_imaginary, even, odd


@triton.jit
def turn(  # type: ignore[no-untyped-def]
    part,
    rows,
    result,
    block,
    heads,
    EPS: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Norm and turn some heads of a block's tokens; values and result begin at the part's first token."""
    values, _, _, _, tokens, stride_token, stride_head = part
    token = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    of_real, of_imaginary, cos, sin = _tables(part, rows, token, column, SPLIT)
    values += token * stride_token + column
    result += token * heads * WIDTH + column
    for head in range(HEADS):
        real, imaginary = _pairs(load_rows(values, head * stride_head, inside))
        inverse = _inverse(real, imaginary, EPS)
        real, imaginary = real * inverse * of_real, imaginary * inverse * of_imaginary
        turned = _whole(real * cos - imaginary * sin, imaginary * cos + real * sin)
        tl.store(result + head * WIDTH, turned, mask=inside)


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
        turn(part, rows, result, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS)
    elif JOINED:
        # another name: what both branches assign would have to be of one type, and lengths differ in theirs
        second += sample * second_batch + head * second_head
        other = (second, second_weight, second_cos, second_sin, second_tokens, second_token, second_head)
        result += first_tokens * heads * WIDTH
        turn(other, rows, result, block - blocks, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS)


@triton.jit
def turn_back(  # type: ignore[no-untyped-def]
    part,
    rows,
    given,
    result,
    block,
    heads,
    EPS: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """The gradient of `turn` for its values, from that of its result; all begin as there."""
    values, _, _, _, tokens, stride_token, stride_head = part
    gradient, gradient_token, gradient_head = given
    token = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    of_real, of_imaginary, cos, sin = _tables(part, rows, token, column, SPLIT)
    values += token * stride_token + column
    gradient += token * gradient_token + column
    result += token * heads * WIDTH + column
    for head in range(HEADS):
        real, imaginary = _pairs(load_rows(values, head * stride_head, inside))
        left, right = _pairs(load_rows(gradient, head * gradient_head, inside))
        inverse = _inverse(real, imaginary, EPS)
        real, imaginary = real * inverse, imaginary * inverse
        left, right = (left * cos + right * sin) * of_real, (right * cos - left * sin) * of_imaginary
        mean = tl.sum(left * real + right * imaginary, 1, keep_dims=True) / WIDTH
        changed = _whole((left - real * mean) * inverse, (right - imaginary * mean) * inverse)
        tl.store(result + head * WIDTH, changed, mask=inside)


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
        turn_back(part, rows, given, of_first, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS)
    elif JOINED:
        given = (gradient + first_tokens * gradient_token, gradient_token, gradient_head)
        second += sample * second_batch + head * second_head
        other = (second, second_weight, second_cos, second_sin, second_tokens, second_token, second_head)
        of_second += (sample * second_tokens * heads + head) * WIDTH
        turn_back(other, rows, given, of_second, block - blocks, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS)
