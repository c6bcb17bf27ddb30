"""Triton kernels for CUDA between joint products of queries, keys and values, and attention.

A program does for queries, keys or values what those of `rotary` do. For two streams it can add the
adapters' products of low rank to theirs as it reads them. Imported as `kernels` is, and for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from trainer.modeling.triton.heads import place_of, stream_backward, stream_forward, wide_low, wide_part
from trainer.modeling.triton.rotary import aligned, row_stride, tiles

# what a program adds at most: the more, the more of the right side it reads for its few tokens. Forward and
# backward take 63 and 123 us at 16 in place of 111 and 96, but 76 and 195 at 32 in place of 122 and 97 (H200)
MOST_RANK = 16
# tokens, warps and stages of a program that adds: it reads the right side anew for its tokens, and what more
# stages load ahead takes shared memory from other programs
_LOW_FORWARD, _LOW_BACKWARD = (16, 4, 1), (32, 8, 1)


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
    first_hidden: torch.Tensor | None = None,
    first_up: torch.Tensor | None = None,
    second_hidden: torch.Tensor | None = None,
    second_up: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Queries and keys of `wide.wide_norm_rotary`, and of two streams the values too; tables as there.

    `hidden` and `up`, the adapters' sides, are both streams' or none's, and bf16; `up` is block diagonal.
    """
    width = len(first_query_weight)
    batch, tokens, heads, _ = _heads(first, width).shape
    low = first_hidden, first_up
    streams = _stream(first, first_query_weight, first_key_weight, first_cos, first_sin, *low)
    if second is not None:
        low, tokens = (second_hidden, second_up), tokens + second.shape[1]
        streams += _stream(second, second_query_weight, second_key_weight, second_cos, second_sin, *low)
    shape, count = (batch, tokens, heads, width), 2 if second is None else 3
    results = [torch.empty(shape, dtype=first.dtype, device=first.device) for _ in range(count)]
    grid, sizes = _tiles(first, second, width, (first_up, second_up), _LOW_FORWARD)
    wrap_triton(_wide_norm_rotary)[(*grid, count)](
        results[0],
        results[1],
        first if second is None else results[2],
        heads,
        *(streams * 2)[:16],
        row_stride(first_cos, first_sin, second_cos, second_sin),
        EPS=eps,
        SPLIT=first_sin is not None,
        **sizes,
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
    first_hidden: torch.Tensor | None = None,
    first_up: torch.Tensor | None = None,
    second_hidden: torch.Tensor | None = None,
    second_up: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The gradients of `wide_norm_rotary` for its products, contiguous, and for each `hidden` there is."""
    width, low = len(first_query_weight), (first_hidden, first_up)
    streams = _stream(first, first_query_weight, first_key_weight, first_cos, first_sin, *low)
    if second is not None:
        low = second_hidden, second_up
        streams += _stream(second, second_query_weight, second_key_weight, second_cos, second_sin, *low)
    given = [one for one in (first, second) if one is not None]
    results = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in given]
    gradients = [aligned(one) for one in (query, key, value)]
    grid, sizes = _tiles(first, second, width, (first_up, second_up), _LOW_BACKWARD)
    of_hidden = _of_hidden(query, sizes)
    wrap_triton(_wide_norm_rotary_backward)[(*grid, 3)](
        *gradients,
        *(stride for one in gradients for stride in one.stride()[:3]),
        results[0],
        first if second is None else results[1],
        first if of_hidden is None else of_hidden,
        query.shape[2],
        *(streams * 2)[:16],
        row_stride(first_cos, first_sin, second_cos, second_sin),
        EPS=eps,
        SPLIT=first_sin is not None,
        **sizes,
    )
    return results if of_hidden is None else results + _added_up(of_hidden, first_hidden, second_hidden)


def _heads(wide: torch.Tensor, width: int) -> torch.Tensor:
    """The queries of a joint product, (batch, tokens, heads, width)."""
    return wide.unflatten(-1, (3, -1, width))[:, :, 0]


def _stream(
    wide: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    hidden: torch.Tensor | None,
    up: torch.Tensor | None,
) -> tuple[Any, ...]:
    """A part as the kernels take it: its tensors, and number of tokens."""
    assert query_weight is not None and key_weight is not None and cos is not None
    tables = cos, cos if sin is None else sin
    low = (cos, cos) if hidden is None or up is None else (hidden.contiguous(), up.contiguous())
    return (wide.contiguous(), query_weight, key_weight, *tables, wide.shape[1], *low)


def _tiles(
    first: torch.Tensor,
    second: torch.Tensor | None,
    width: int,
    ups: tuple[torch.Tensor | None, ...],
    low: tuple[int, int, int],
) -> tuple[Any, dict[str, Any]]:
    """As `rotary.tiles`, with ranks and a program's shape: `low` is that of one that adds."""
    ranks = [0 if up is None else up.shape[1] // 3 for up in ups]
    most = max(ranks)
    rows = low[0] if most else None
    grid, sizes = tiles(_heads(first, width), None if second is None else _heads(second, width), rows)
    sizes |= {"FIRST_RANK": ranks[0], "SECOND_RANK": ranks[1]}
    if most == 0:
        return grid, sizes | {"RANK": 0, "num_warps": 4}
    padded = max(16, triton.next_power_of_2(most))
    return grid, sizes | {"RANK": padded, "num_warps": low[1], "num_stages": low[2]}


def _of_hidden(query: torch.Tensor, sizes: dict[str, Any]) -> torch.Tensor | None:
    """For the programs' parts of the gradients for `hidden`, (batch, all tokens, programs, 3, RANK)."""
    batch, tokens, heads, _ = query.shape
    shape = (batch, tokens, heads // sizes["HEADS"], 3, sizes["RANK"])
    return torch.empty(shape, dtype=torch.float32, device=query.device) if sizes["RANK"] else None


def _added_up(of_hidden: torch.Tensor, *hiddens: torch.Tensor | None) -> list[torch.Tensor]:
    """The gradient for each of `hiddens`, which is (batch, tokens, 3 * rank)."""
    found, start = [], 0
    for hidden in hiddens:
        assert hidden is not None
        own = of_hidden[:, start : start + hidden.shape[1], ..., : hidden.shape[2] // 3]
        found.append(own.sum(2).flatten(2).to(hidden.dtype))
        start += hidden.shape[1]
    return found


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
def _forward(  # type: ignore[no-untyped-def]
    results,
    first,
    second,
    heads,
    rows,
    EPS: tl.constexpr,
    JOINED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
):
    """What one program does."""
    query, key, value = results
    one, first_low = first
    two, second_low = second
    _, _, _, _, _, first_tokens = one
    _, _, _, _, _, second_tokens = two
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
        part = wide_part(which, one, sample, column, row, WIDTH)
        low = wide_low(which, first_low, first_tokens, sample, column)
        stream_forward(
            which, part, low, rows, result, block, heads, EPS, JOINED, SPLIT, WIDTH, TOKENS, HEADS, RANK
        )
    elif JOINED:
        # other names: what both branches assign would have to be of one type, and lengths differ in theirs
        other = wide_part(which, two, sample, column, row, WIDTH)
        added = wide_low(which, second_low, second_tokens, sample, column)
        result += first_tokens * heads * WIDTH
        block -= blocks
        stream_forward(
            which, other, added, rows, result, block, heads, EPS, JOINED, SPLIT, WIDTH, TOKENS, HEADS, RANK
        )


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
    first_hidden,
    first_up,
    second,
    second_query,
    second_key,
    second_cos,
    second_sin,
    second_tokens,
    second_hidden,
    second_up,
    rows,
    EPS: tl.constexpr,
    JOINED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    FIRST_RANK: tl.constexpr,
    SECOND_RANK: tl.constexpr,
    RANK: tl.constexpr,
):
    low, other = (first_hidden, first_up, FIRST_RANK), (second_hidden, second_up, SECOND_RANK)
    first = ((first, first_query, first_key, first_cos, first_sin, first_tokens), low)
    second = ((second, second_query, second_key, second_cos, second_sin, second_tokens), other)
    results = (query, key, value)
    _forward(results, first, second, heads, rows, EPS, JOINED, SPLIT, WIDTH, TOKENS, HEADS, RANK)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    picked,
    of_hidden,
    first,
    second,
    heads,
    rows,
    EPS: tl.constexpr,
    JOINED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
):
    """What one program does backward, of the gradient `picked`, a pointer and its strides."""
    one, first_low, of_first = first
    two, second_low, of_second = second
    _, _, _, _, _, first_tokens = one
    _, _, _, _, _, second_tokens = two
    sample, head, block, blocks = place_of(heads, first_tokens, second_tokens, JOINED, TOKENS, HEADS)
    which = tl.program_id(1)
    gradient, stride_batch, stride_token, stride_head = picked
    gradient += sample * stride_batch + head * stride_head
    column, row = (which * heads + head) * WIDTH, 3 * heads * WIDTH
    # (batch, all tokens, programs of a token, 3, RANK)
    inner = heads // HEADS * 3 * RANK
    of_hidden += sample * (first_tokens + second_tokens) * inner + (head // HEADS * 3 + which) * RANK
    if block < blocks:
        part = wide_part(which, one, sample, column, row, WIDTH)
        low = wide_low(which, first_low, first_tokens, sample, column)
        of_first += sample * first_tokens * row + column
        given, of_low = (gradient, stride_token, stride_head), (of_hidden, inner)
        results = (of_first, of_low)
        stream_backward(
            which, part, low, rows, given, results, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS, RANK
        )
    elif JOINED:
        other = wide_part(which, two, sample, column, row, WIDTH)
        added = wide_low(which, second_low, second_tokens, sample, column)
        of_second += sample * second_tokens * row + column
        given = (gradient + first_tokens * stride_token, stride_token, stride_head)
        of_low = (of_hidden + first_tokens * inner, inner)
        results = (of_second, of_low)
        block -= blocks
        stream_backward(
            which, other, added, rows, given, results, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS, RANK
        )


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
    of_hidden,
    heads,
    first,
    first_query,
    first_key,
    first_cos,
    first_sin,
    first_tokens,
    first_hidden,
    first_up,
    second,
    second_query,
    second_key,
    second_cos,
    second_sin,
    second_tokens,
    second_hidden,
    second_up,
    rows,
    EPS: tl.constexpr,
    JOINED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    FIRST_RANK: tl.constexpr,
    SECOND_RANK: tl.constexpr,
    RANK: tl.constexpr,
):
    one, two = (query, query_batch, query_token, query_head), (key, key_batch, key_token, key_head)
    picked = _pick(tl.program_id(1), one, two, (value, value_batch, value_token, value_head))
    low, other = (first_hidden, first_up, FIRST_RANK), (second_hidden, second_up, SECOND_RANK)
    first = ((first, first_query, first_key, first_cos, first_sin, first_tokens), low, of_first)
    second = ((second, second_query, second_key, second_cos, second_sin, second_tokens), other, of_second)
    _backward(picked, of_hidden, first, second, heads, rows, EPS, JOINED, SPLIT, WIDTH, TOKENS, HEADS, RANK)
