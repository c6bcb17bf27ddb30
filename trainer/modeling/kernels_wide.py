"""Floor 4: Triton kernels for CUDA between joint products of queries, keys and values, and attention.

A program does for queries, keys or values what those of `kernels_rotary` do. Imported as `kernels` is, and
for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from trainer.modeling.kernels_rotary import aligned, load_rows, place_of, row_stride, tiles, turn, turn_back


@triton_op("trainer::wide_norm_rotary", mutates_args={})
def wide_norm_rotary(
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
) -> list[torch.Tensor]:
    """Queries and keys of `wide.wide_norm_rotary`, and of two streams the values too; tables as there."""
    width = len(first_query_weight)
    batch, tokens, heads, _ = _heads(first, width).shape
    streams = _stream(first, first_query_weight, first_key_weight, first_cos, first_sin)
    if second is None:
        streams, given = streams + streams, None
    else:
        streams += _stream(second, second_query_weight, second_key_weight, second_cos, second_sin)
        tokens, given = tokens + second.shape[1], _heads(second, width)
    shape, count = (batch, tokens, heads, width), 2 if second is None else 3
    results = [torch.empty(shape, dtype=first.dtype, device=first.device) for _ in range(count)]
    grid, sizes = tiles(_heads(first, width), given)
    wrap_triton(_wide_norm_rotary)[(*grid, count)](
        results[0],
        results[1],
        first if second is None else results[2],
        heads,
        *streams,
        row_stride(first_cos, first_sin, second_cos, second_sin),
        EPS=eps,
        SPLIT=first_sin is not None,
        **sizes,
        num_warps=4,
    )
    return results


@triton_op("trainer::wide_norm_rotary_backward", mutates_args={})
def wide_norm_rotary_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
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
) -> list[torch.Tensor]:
    """The gradients of `wide_norm_rotary` for its products, contiguous, from those of its results."""
    width = len(first_query_weight)
    streams = _stream(first, first_query_weight, first_key_weight, first_cos, first_sin)
    if second is None:
        streams, given = streams + streams, [first]
    else:
        streams += _stream(second, second_query_weight, second_key_weight, second_cos, second_sin)
        given = [first, second]
    results = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in given]
    gradients = [aligned(one) for one in (query, key, value)]
    grid, sizes = tiles(_heads(first, width), None if second is None else _heads(second, width))
    wrap_triton(_wide_norm_rotary_backward)[(*grid, 3)](
        *gradients,
        *(stride for one in gradients for stride in one.stride()[:3]),
        results[0],
        first if second is None else results[1],
        query.shape[2],
        *streams,
        row_stride(first_cos, first_sin, second_cos, second_sin),
        EPS=eps,
        SPLIT=first_sin is not None,
        **sizes,
        num_warps=4,
    )
    return results


def _heads(wide: torch.Tensor, width: int) -> torch.Tensor:
    """The queries of a joint product, (batch, tokens, heads, width)."""
    return wide.unflatten(-1, (3, -1, width))[:, :, 0]


def _stream(
    wide: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> tuple[Any, ...]:
    """A part as the kernels take it: its tensors, and number of tokens."""
    assert query_weight is not None and key_weight is not None and cos is not None
    tables = cos, cos if sin is None else sin
    return (wide.contiguous(), query_weight, key_weight, *tables, wide.shape[1])


@triton.jit
def _pick(which, one, two, three):  # type: ignore[no-untyped-def]
    """That of three pointers with their strides which a program is for."""
    pointer = one[0]
    if which == 1:
        pointer = two[0]
    elif which == 2:
        pointer = three[0]
    # not in the branches above, where all must be integers of one size
    batch = tl.where(which == 0, one[1], tl.where(which == 1, two[1], three[1]))
    token = tl.where(which == 0, one[2], tl.where(which == 1, two[2], three[2]))
    head = tl.where(which == 0, one[3], tl.where(which == 1, two[3], three[3]))
    return pointer, batch, token, head


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    source,
    source_token,
    source_head,
    result,
    result_token,
    tokens,
    block,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Some heads of a block's tokens as they are; both begin at the part's first token."""
    token = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    source += token * source_token + column
    result += token * result_token + column
    for head in range(HEADS):
        tl.store(result + head * WIDTH, load_rows(source, head * source_head, inside), mask=inside)


@triton.jit
def _part(which, stream, sample, column, row, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A stream as `turn` takes it, from a program's sample and column of the product on."""
    wide, query_weight, key_weight, cos, sin, tokens = stream
    weight = query_weight
    if which == 1:
        weight = key_weight
    return wide + sample * tokens * row + column, weight, cos, sin, tokens, row, WIDTH


@triton.jit
def _stream_forward(  # type: ignore[no-untyped-def]
    which,
    part,
    rows,
    result,
    block,
    heads,
    EPS: tl.constexpr,
    JOINED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """What one program does, in the stream that its block is of."""
    if which < 2:
        turn(part, rows, result, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS)
    elif JOINED:
        values, _, _, _, tokens, token, head = part
        _copy(values, token, head, result, heads * WIDTH, tokens, block, WIDTH, TOKENS, HEADS)


@triton.jit
def _wide_norm_rotary(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    heads,
    first,
    first_query,
    first_key,
    first_cos,
    first_sin,
    first_tokens,
    second,
    second_query,
    second_key,
    second_cos,
    second_sin,
    second_tokens,
    rows,
    EPS: tl.constexpr,
    JOINED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    sample, head, block, blocks = place_of(heads, first_tokens, second_tokens, JOINED, TOKENS, HEADS)
    which = tl.program_id(1)
    result = query
    if which == 1:
        result = key
    start = sample * first_tokens * heads
    if JOINED:
        start += sample * second_tokens * heads
        if which == 2:
            result = value
    result += (start + head) * WIDTH
    column, row = (which * heads + head) * WIDTH, 3 * heads * WIDTH
    if block < blocks:
        stream = (first, first_query, first_key, first_cos, first_sin, first_tokens)
        part = _part(which, stream, sample, column, row, WIDTH)
        _stream_forward(which, part, rows, result, block, heads, EPS, JOINED, SPLIT, WIDTH, TOKENS, HEADS)
    elif JOINED:
        # other names: what both branches assign would have to be of one type, and lengths differ in theirs
        another = (second, second_query, second_key, second_cos, second_sin, second_tokens)
        other = _part(which, another, sample, column, row, WIDTH)
        result += first_tokens * heads * WIDTH
        block -= blocks
        _stream_forward(which, other, rows, result, block, heads, EPS, JOINED, SPLIT, WIDTH, TOKENS, HEADS)


@triton.jit
def _stream_backward(  # type: ignore[no-untyped-def]
    which,
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
    """What one program does backward, in the stream that its block is of; the result is its sample's."""
    if which < 2:
        # three times as many heads lie between the tokens of a product
        turn_back(part, rows, given, result, block, 3 * heads, EPS, SPLIT, WIDTH, TOKENS, HEADS)
    else:
        _, _, _, _, tokens, _, _ = part
        gradient, token, head = given
        # a step of the result's from `part` would tell torch that all of the part's tensors are written
        _copy(gradient, token, head, result, 3 * heads * WIDTH, tokens, block, WIDTH, TOKENS, HEADS)


@triton.jit
def _program_backward(  # type: ignore[no-untyped-def]
    picked,
    of_first,
    of_second,
    heads,
    first,
    second,
    rows,
    EPS: tl.constexpr,
    JOINED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """What one program does backward, of the gradient `picked`, a pointer and its strides."""
    _, _, _, _, _, first_tokens = first
    _, _, _, _, _, second_tokens = second
    sample, head, block, blocks = place_of(heads, first_tokens, second_tokens, JOINED, TOKENS, HEADS)
    which = tl.program_id(1)
    gradient, stride_batch, stride_token, stride_head = picked
    gradient += sample * stride_batch + head * stride_head
    column, row = (which * heads + head) * WIDTH, 3 * heads * WIDTH
    if block < blocks:
        part = _part(which, first, sample, column, row, WIDTH)
        of_first += sample * first_tokens * row + column
        given = (gradient, stride_token, stride_head)
        _stream_backward(which, part, rows, given, of_first, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS)
    elif JOINED:
        other = _part(which, second, sample, column, row, WIDTH)
        of_second += sample * second_tokens * row + column
        given = (gradient + first_tokens * stride_token, stride_token, stride_head)
        block -= blocks
        _stream_backward(which, other, rows, given, of_second, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS)


@triton.jit
def _wide_norm_rotary_backward(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    query_batch,
    query_token,
    query_head,
    key_batch,
    key_token,
    key_head,
    value_batch,
    value_token,
    value_head,
    of_first,
    of_second,
    heads,
    first,
    first_query,
    first_key,
    first_cos,
    first_sin,
    first_tokens,
    second,
    second_query,
    second_key,
    second_cos,
    second_sin,
    second_tokens,
    rows,
    EPS: tl.constexpr,
    JOINED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    one, two = (query, query_batch, query_token, query_head), (key, key_batch, key_token, key_head)
    picked = _pick(tl.program_id(1), one, two, (value, value_batch, value_token, value_head))
    first = (first, first_query, first_key, first_cos, first_sin, first_tokens)
    second = (second, second_query, second_key, second_cos, second_sin, second_tokens)
    _program_backward(
        picked, of_first, of_second, heads, first, second, rows, EPS, JOINED, SPLIT, WIDTH, TOKENS, HEADS
    )
