"""What Triton programs do with the heads of a stream's tokens: norm, turn, copy, and add to them.

A program takes a few tokens with several heads, which share the tokens' rows of the tables. It can add a
product of low rank to the heads before anything else, and then computes that product's gradient too. Imported
as `kernels` is, and for the same reason.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def _low_rows(low, token, inside, RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens of a low-rank product's left side, (tokens, RANK), zeros beyond its own rank."""
    hidden, _, rank = low
    inner = tl.arange(0, RANK)[None, :]
    return tl.load(hidden + token * (3 * rank) + inner, mask=inside & (inner < rank), other=0.0)


@triton.jit
def _low_columns(low, head, WIDTH: tl.constexpr, RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A head of its right side, (RANK, width), zeros likewise."""
    _, up, rank = low
    column = head * WIDTH + tl.arange(0, WIDTH)[None, :]
    inner = tl.arange(0, RANK)[:, None]
    inside = tl.broadcast_to(inner < rank, (RANK, WIDTH))
    return tl.load(up + column * (3 * rank) + inner, mask=inside, other=0.0)


@triton.jit
def _with_low(whole, left, low, head, WIDTH: tl.constexpr, RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A head's values with the product added, and the right side; without one, the values and whatever.

    The sum is in fp32 and not rounded in between: it is never stored.
    """
    if RANK > 0:
        right = _low_columns(low, head, WIDTH, RANK)
        return whole.to(tl.float32) + tl.dot(left, right), right
    else:
        return whole, whole


@triton.jit
def _store_low(of_hidden, found, token, inside, RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's part of the gradient of the left side, (RANK, tokens), columns beyond the rank too.

    That way round, warps share a product's tokens, of which there are more than ranks.
    """
    pointer, stride = of_hidden
    place = tl.trans(token * stride) + tl.arange(0, RANK)[:, None]
    tl.store(pointer + place, found, mask=tl.broadcast_to(tl.trans(inside), place.shape))


@triton.jit
def turn(  # type: ignore[no-untyped-def]
    part,
    low,
    rows,
    result,
    block,
    heads,
    EPS: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
):
    """Norm and turn some heads of a block's tokens; values and result begin at the part's first token.

    `low` is added before: pointers to the left side (tokens, 3 * rank), from the part's first token and the
    columns that these heads have on, and to the right side (all columns, 3 * rank), from their first row and
    the same columns on; and the rank. RANK is a power of two that is not smaller, or 0 where there is none.
    """
    values, _, _, _, tokens, stride_token, stride_head = part
    token = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    of_real, of_imaginary, cos, sin = _tables(part, rows, token, column, SPLIT)
    values += token * stride_token + column
    result += token * heads * WIDTH + column
    low_left = None
    if RANK > 0:
        low_left = _low_rows(low, token, inside, RANK)
    for head in range(HEADS):
        whole = load_rows(values, head * stride_head, inside)
        whole = _with_low(whole, low_left, low, head, WIDTH, RANK)[0]
        real, imaginary = _pairs(whole)
        inverse = _inverse(real, imaginary, EPS)
        real, imaginary = real * inverse * of_real, imaginary * inverse * of_imaginary
        turned = _whole(real * cos - imaginary * sin, imaginary * cos + real * sin)
        tl.store(result + head * WIDTH, turned, mask=inside)


@triton.jit
def turn_back(  # type: ignore[no-untyped-def]
    part,
    low,
    of_hidden,
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
    RANK: tl.constexpr,
):
    """The gradient of `turn` for its values, from that of its result; all begin as there.

    `of_hidden` is a pointer, which begins as `low` does, and how far its tokens are apart: these heads' part
    of the gradient for the left side, in fp32. Parts are added up later, always in one order.
    """
    values, _, _, _, tokens, stride_token, stride_head = part
    gradient, gradient_token, gradient_head = given
    token = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    of_real, of_imaginary, cos, sin = _tables(part, rows, token, column, SPLIT)
    values += token * stride_token + column
    gradient += token * gradient_token + column
    result += token * heads * WIDTH + column
    low_left, found = None, None
    if RANK > 0:
        low_left, found = _low_rows(low, token, inside, RANK), tl.zeros((RANK, TOKENS), dtype=tl.float32)
    for head in range(HEADS):
        whole = load_rows(values, head * stride_head, inside)
        whole, low_right = _with_low(whole, low_left, low, head, WIDTH, RANK)
        real, imaginary = _pairs(whole)
        left, right = _pairs(load_rows(gradient, head * gradient_head, inside))
        inverse = _inverse(real, imaginary, EPS)
        real, imaginary = real * inverse, imaginary * inverse
        left, right = (left * cos + right * sin) * of_real, (right * cos - left * sin) * of_imaginary
        mean = tl.sum(left * real + right * imaginary, 1, keep_dims=True) / WIDTH
        changed = _whole((left - real * mean) * inverse, (right - imaginary * mean) * inverse)
        tl.store(result + head * WIDTH, changed, mask=inside)
        if RANK > 0:
            # rounded as it is stored: that is what the gradient of the right side is made of
            found = tl.dot(low_right, tl.trans(changed.to(low_right.dtype)), found)
    if RANK > 0:
        _store_low(of_hidden, found, token, inside, RANK)


@triton.jit
def copy(  # type: ignore[no-untyped-def]
    source,
    source_token,
    source_head,
    low,
    result,
    result_token,
    tokens,
    block,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
):
    """Some heads of a block's tokens, with `low` as `turn` adds it; all begin at the part's first token."""
    token = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    source += token * source_token + column
    result += token * result_token + column
    low_left = None
    if RANK > 0:
        low_left = _low_rows(low, token, inside, RANK)
    for head in range(HEADS):
        whole = load_rows(source, head * source_head, inside)
        whole = _with_low(whole, low_left, low, head, WIDTH, RANK)[0]
        tl.store(result + head * WIDTH, whole, mask=inside)


@triton.jit
def copy_back(  # type: ignore[no-untyped-def]
    source,
    source_token,
    source_head,
    low,
    of_hidden,
    result,
    result_token,
    tokens,
    block,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
):
    """The gradient of `copy` for its source, from that of its result, and `of_hidden` as in `turn_back`."""
    token = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    source += token * source_token + column
    result += token * result_token + column
    found = None
    if RANK > 0:
        found = tl.zeros((RANK, TOKENS), dtype=tl.float32)
    for head in range(HEADS):
        given = load_rows(source, head * source_head, inside)
        tl.store(result + head * WIDTH, given, mask=inside)
        if RANK > 0:
            found = tl.dot(_low_columns(low, head, WIDTH, RANK), tl.trans(given), found)
    if RANK > 0:
        _store_low(of_hidden, found, token, inside, RANK)


@triton.jit
def wide_part(which, stream, sample, column, row, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A stream as `turn` takes it, from a program's sample and column of the product on."""
    wide, query_weight, key_weight, cos, sin, tokens = stream
    weight = query_weight
    if which == 1:
        weight = key_weight
    return wide + sample * tokens * row + column, weight, cos, sin, tokens, row, WIDTH


@triton.jit
def wide_low(which, low, tokens, sample, column):  # type: ignore[no-untyped-def]
    """What is added to it, likewise."""
    hidden, up, rank = low
    return hidden + (sample * tokens * 3 + which) * rank, up + (column * 3 + which) * rank, rank


@triton.jit
def stream_forward(  # type: ignore[no-untyped-def]
    which,
    part,
    low,
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
    RANK: tl.constexpr,
):
    """What one program does, in the stream that its block is of."""
    if which < 2:
        turn(part, low, rows, result, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS, RANK)
    elif JOINED:
        values, _, _, _, tokens, token, head = part
        row = heads * WIDTH
        copy(values, token, head, low, result, row, tokens, block, WIDTH, TOKENS, HEADS, RANK)


@triton.jit
def stream_backward(  # type: ignore[no-untyped-def]
    which,
    part,
    low,
    rows,
    given,
    results,
    block,
    heads,
    EPS: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
):
    """What one program does backward, in the stream that its block is of; the results are its sample's."""
    result, of_hidden = results
    # three times as many heads lie between the tokens of a product
    wide = 3 * heads
    if which < 2:
        turn_back(
            part, low, of_hidden, rows, given, result, block, wide, EPS, SPLIT, WIDTH, TOKENS, HEADS, RANK
        )
    else:
        _, _, _, _, tokens, _, _ = part
        gradient, token, head = given
        # a step of the result's from `part` would tell torch that all of the part's tensors are written
        row = wide * WIDTH
        copy_back(
            gradient, token, head, low, of_hidden, result, row, tokens, block, WIDTH, TOKENS, HEADS, RANK
        )
