"""Triton kernels for CUDA between products of queries, keys and values, and attention: norm, RoPE, joining.

Imported only where torch was built for CUDA. Each of one or two streams of tokens has either one tensor
of heads, or (QKV) the joint product of queries, keys and values. The first stream's tokens come first in the
results, which are contiguous, (batch, all tokens, heads, width), so that nothing is put beside each other.

    heads   values (batch, tokens, heads, width), any strides at multiples of 8 values, the last is 1
    QKV     values (batch, tokens, 3, heads, width), contiguous: [queries | keys | values] of each token
    tables  (tokens, width) fp32: cosines in columns 2 i and, where SPLIT, sines in columns 2 i of another
            table; else sines in columns 2 i + 1. Rows of all of them are `table_row` apart
    low     hidden (batch, tokens, 3 * rank) and up (3 * heads * width, 3 * rank), block diagonal, bf16:
            hidden @ up.T is added to the product before anything else; a stream's rank may be less than RANK

A program, by its two numbers, does TOKENS tokens of one stream of one sample, HEADS heads of them:

    program_id(0)   sample, then block of tokens (the first stream's blocks before the second's), then group
                    of heads; see `heads.place_of`
    program_id(1)   0 queries, or the one tensor; 1 keys; 2 values, which are only copied

Backward a program reads the gradient of what it wrote, with strides of its own for each result, and writes
the gradient of its part of `values`. Its part of the gradient of `hidden` goes into (batch, all tokens,
programs of a token, 3, RANK) fp32, which are added up later, always in one order.

The kernels' arguments, `first_*` and `second_*` (the first's once more where there is no second):

    values, query_weight, key_weight, cos, sin, tokens, then strides of batch, token and head (heads alone)
    hidden, up, RANK (0 where nothing is added)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from trainer.modeling.triton.heads import place_of, stream_backward, stream_forward

Tensors = Sequence[torch.Tensor]

# what a program adds at most: the more, the more of the right side it reads for its few tokens. Forward and
# backward take 63 and 123 us at 16 in place of 111 and 96, but 76 and 195 at 32 in place of 122 and 97 (H200)
MOST_RANK = 16
# tokens, warps and stages of a program that adds: it reads the right side anew for its tokens, and what more
# stages load ahead takes shared memory from other programs
_LOW_FORWARD, _LOW_BACKWARD = (16, 4, 1), (32, 8, 1)
# values of one head that a program holds, and heads that it takes one after the other, at most
_VALUES, _MOST_HEADS = 2048, 8


@triton_op("trainer::norm_rotary", mutates_args={})
def norm_rotary(
    values: Tensors, weights: Tensors, tables: Tensors, low: Tensors, eps: float
) -> list[torch.Tensor]:
    """See `fused.norm_rotary`: the heads of all streams; or queries and keys, and the values of two streams.

    `values` has one tensor a stream, `weights` one (heads) or two (QKV: of queries and keys), `tables` one or
    two, whose rows are at multiples of 16 bytes, `low` none or two.
    """
    shapes = _shapes(values, weights)
    batch, _, heads, width = shapes[0]
    count = 1 if len(weights) == len(values) else 1 + len(values)
    shape = (batch, sum(shape[1] for shape in shapes), heads, width)
    results = [torch.empty(shape, dtype=values[0].dtype, device=values[0].device) for _ in range(count)]
    grid, sizes = _tiles(shapes, low, _LOW_FORWARD)
    wrap_triton(_norm_rotary)[(*grid, count)](
        *(results + [values[0]] * 2)[:3],
        heads,
        *_streams(values, weights, tables, low),
        _table_row(tables),
        EPS=eps,
        QKV=len(weights) > len(values),
        SPLIT=len(tables) > len(values),
        **sizes,
    )
    return results


@triton_op("trainer::norm_rotary_backward", mutates_args={})
def norm_rotary_backward(
    gradients: Tensors, values: Tensors, weights: Tensors, tables: Tensors, low: Tensors, eps: float
) -> list[torch.Tensor]:
    """The gradients of `norm_rotary` for its values, contiguous, and for each `hidden` there is.

    `gradients` are those of all heads, or of queries, keys and values.
    """
    given = [_aligned(one) for one in gradients]
    results = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in values]
    grid, sizes = _tiles(_shapes(values, weights), low, _LOW_BACKWARD)
    batch, tokens, heads, _ = gradients[0].shape
    of_hidden = values[0]
    if low:
        shape = (batch, tokens, heads // sizes["HEADS"], 3, sizes["RANK"])
        of_hidden = torch.empty(shape, dtype=torch.float32, device=values[0].device)
    wrap_triton(_norm_rotary_backward)[(*grid, len(given))](
        *(given * 3)[:3],
        *(stride for one in (given * 3)[:3] for stride in one.stride()[:3]),
        *[*results, values[0]][:2],
        of_hidden,
        heads,
        *_streams(values, weights, tables, low),
        _table_row(tables),
        EPS=eps,
        QKV=len(weights) > len(values),
        SPLIT=len(tables) > len(values),
        **sizes,
    )
    start = 0
    for hidden in low[::2]:
        own = of_hidden[:, start : start + hidden.shape[1], ..., : hidden.shape[2] // 3]
        results.append(own.sum(2).flatten(2).to(hidden.dtype))
        start += hidden.shape[1]
    return results


def _shapes(values: Tensors, weights: Tensors) -> list[torch.Size]:
    """(batch, tokens, heads, width) of each stream."""
    if len(weights) == len(values):
        return [one.shape for one in values]
    return [one.unflatten(-1, (3, -1, len(weights[0])))[:, :, 0].shape for one in values]


def _streams(values: Tensors, weights: Tensors, tables: Tensors, low: Tensors) -> list[Any]:
    """Both streams as the kernels take them; a single one twice, and in the place of `low` anything."""
    count, found = len(values), []
    for number, one in enumerate(values):
        # a joint product's strides follow from its shape
        one, strides = (_aligned(one), None) if len(weights) == count else (one.contiguous(), (0, 0, 0))
        norms = weights[number * len(weights) // count :][: len(weights) // count]
        rope = tables[number * len(tables) // count :][: len(tables) // count]
        own = [part.contiguous() for part in low[2 * number : 2 * number + 2]] or [rope[0]] * 2
        found += [one, norms[0], norms[-1], rope[0], rope[-1], one.shape[1]]
        found += [*(strides or one.stride()[:3]), *own]
    return found if count == 2 else found * 2


def _aligned(values: torch.Tensor) -> torch.Tensor:
    """`values` where each row lies in one piece from a multiple of 8 values on, else a copy."""
    *strides, last = values.stride()
    if last == 1 and all(place % 8 == 0 for place in (*strides, values.storage_offset())):
        return values
    return values.contiguous()


def _table_row(tables: Tensors) -> int:
    """The row stride of all tables; a table of a single row is left out, its stride means nothing."""
    first, *others = [table.stride() for table in tables if table.shape[0] > 1] or [tables[0].stride()]
    assert first[1] == 1 and first[0] % 4 == 0 and all(other == first for other in others)
    return first[0]


def _tiles(
    shapes: Sequence[torch.Size], low: Tensors, adding: tuple[int, int, int]
) -> tuple[Any, dict[str, Any]]:
    """The kernels' grid and sizes; `adding` are tokens, warps and stages of a program that adds."""
    batch, _, heads, width = shapes[0]
    ranks = [up.shape[1] // 3 for up in low[1::2]] or [0, 0]
    padded = max(16, triton.next_power_of_2(max(ranks))) if low else 0
    tokens = adding[0] if low else _VALUES // width
    together = next(count for count in range(_MOST_HEADS, 0, -1) if heads % count == 0)
    blocks = sum(triton.cdiv(shape[1], tokens) for shape in shapes)
    sizes = {"JOINED": len(shapes) == 2, "WIDTH": width, "TOKENS": tokens, "HEADS": together, "RANK": padded}
    sizes |= {"FIRST_RANK": ranks[0], "SECOND_RANK": ranks[1], "num_warps": adding[1] if low else 4}
    if low:
        sizes["num_stages"] = adding[2]
    return (batch * blocks * (heads // together),), sizes


@triton.jit
def _norm_rotary(  # type: ignore[no-untyped-def]
    query, key, value, heads,
    first, first_query, first_key, first_cos, first_sin, first_tokens,
    first_batch, first_token, first_head, first_hidden, first_up,
    second, second_query, second_key, second_cos, second_sin, second_tokens,
    second_batch, second_token, second_head, second_hidden, second_up,
    table_row,
    EPS: tl.constexpr, QKV: tl.constexpr, SPLIT: tl.constexpr, JOINED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, FIRST_RANK: tl.constexpr,
    SECOND_RANK: tl.constexpr,
):  # fmt: skip
    sample, head, block, blocks = place_of(heads, first_tokens, second_tokens, JOINED, TOKENS, HEADS)
    which, result, start = 0, query, sample * first_tokens * heads
    if QKV:
        which = tl.program_id(1)
        if which == 1:
            result = key
    if JOINED:
        start += sample * second_tokens * heads
        if QKV:  # noqa: SIM102 (known when it is compiled)
            if which == 2:
                result = value
    result += (start + head) * WIDTH
    if block < blocks:
        stream = (first, first_query, first_key, first_cos, first_sin, first_tokens,
                  first_batch, first_token, first_head)  # fmt: skip
        low = (first_hidden, first_up, FIRST_RANK)
        stream_forward(
            which, stream, low, sample, head, table_row, result, block, heads,
            EPS, QKV, JOINED, SPLIT, WIDTH, TOKENS, HEADS, RANK,
        )  # fmt: skip
    elif JOINED:
        # other names: what both branches assign would have to be of one type, and lengths differ in theirs
        other = (second, second_query, second_key, second_cos, second_sin, second_tokens,
                 second_batch, second_token, second_head)  # fmt: skip
        added = (second_hidden, second_up, SECOND_RANK)
        result += first_tokens * heads * WIDTH
        stream_forward(
            which, other, added, sample, head, table_row, result, block - blocks, heads,
            EPS, QKV, JOINED, SPLIT, WIDTH, TOKENS, HEADS, RANK,
        )  # fmt: skip


@triton.jit
def _norm_rotary_backward(  # type: ignore[no-untyped-def]
    query, key, value, query_batch, query_token, query_head, key_batch, key_token, key_head,
    value_batch, value_token, value_head, of_first, of_second, of_hidden, heads,
    first, first_query, first_key, first_cos, first_sin, first_tokens,
    first_batch, first_token, first_head, first_hidden, first_up,
    second, second_query, second_key, second_cos, second_sin, second_tokens,
    second_batch, second_token, second_head, second_hidden, second_up,
    table_row,
    EPS: tl.constexpr, QKV: tl.constexpr, SPLIT: tl.constexpr, JOINED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, FIRST_RANK: tl.constexpr,
    SECOND_RANK: tl.constexpr,
):  # fmt: skip
    sample, head, block, blocks = place_of(heads, first_tokens, second_tokens, JOINED, TOKENS, HEADS)
    which, row_heads, gradient = 0, heads, query
    stride_batch, stride_token, stride_head = query_batch, query_token, query_head
    if QKV:
        which, row_heads = tl.program_id(1), 3 * heads
        if which == 1:
            gradient = key
        elif which == 2:
            gradient = value
        # not in the branches above, where all must be integers of one size
        stride_batch = _of_three(which, query_batch, key_batch, value_batch)
        stride_token = _of_three(which, query_token, key_token, value_token)
        stride_head = _of_three(which, query_head, key_head, value_head)
    gradient += sample * stride_batch + head * stride_head
    column, row = (which * heads + head) * WIDTH, row_heads * WIDTH
    # (batch, all tokens, programs of a token, 3, RANK)
    inner = heads // HEADS * 3 * RANK
    of_hidden += sample * (first_tokens + second_tokens) * inner + (head // HEADS * 3 + which) * RANK
    if block < blocks:
        stream = (first, first_query, first_key, first_cos, first_sin, first_tokens,
                  first_batch, first_token, first_head)  # fmt: skip
        low = (first_hidden, first_up, FIRST_RANK)
        of_first += sample * first_tokens * row + column
        stream_backward(
            which, stream, low, sample, head, table_row, (gradient, stride_token, stride_head), of_first,
            (of_hidden, inner), block, heads, row_heads, EPS, QKV, SPLIT, WIDTH, TOKENS, HEADS, RANK,
        )  # fmt: skip
    elif JOINED:
        other = (second, second_query, second_key, second_cos, second_sin, second_tokens,
                 second_batch, second_token, second_head)  # fmt: skip
        added = (second_hidden, second_up, SECOND_RANK)
        of_second += sample * second_tokens * row + column
        gradient += first_tokens * stride_token
        of_hidden += first_tokens * inner
        stream_backward(
            which, other, added, sample, head, table_row, (gradient, stride_token, stride_head), of_second,
            (of_hidden, inner), block - blocks, heads, row_heads, EPS, QKV, SPLIT, WIDTH, TOKENS, HEADS, RANK,
        )  # fmt: skip


@triton.jit
def _of_three(which, query, key, value):  # type: ignore[no-untyped-def]
    return tl.where(which == 0, query, tl.where(which == 1, key, value))
