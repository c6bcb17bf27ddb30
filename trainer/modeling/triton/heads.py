"""Programs over the heads of a stream's tokens: norm, RoPE, a low-rank addend, and their gradients.

Imported only where torch was built for CUDA. A program holds TOKENS tokens of one head at a time:

    token           0 .. TOKENS of a block; those beyond the stream's `tokens` are masked
    column          0 .. WIDTH of a head; values 2 i and 2 i + 1 are real and imaginary part of a number
    values          at token * stride_token + head * stride_head + column, for head 0 .. HEADS
    result          at (token * row_heads + head) * WIDTH + column: `row_heads` heads lie between two tokens
    cos, sin        at token * table_row + column, read once for all HEADS
    low             hidden at token * 3 * rank + inner, up at (head * WIDTH + column) * 3 * rank + inner

    part       (values, weight, cos, sin, tokens, stride_token, stride_head), from the program's sample and
               first head on
    low        (hidden, up, rank) likewise, from the columns `inner` on that are these heads'
    given      (gradient of the result, its stride_token, its stride_head)
    of_hidden  (pointer to fp32, stride of a token)
    NORMED     False for values of attention, which are copied
    RANK       a power of two that is at least the rank; 0 where nothing is added
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(  # type: ignore[no-untyped-def]
    heads, first, second, JOINED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr
):
    """This program's sample, first head and block of tokens, and the number of the first stream's blocks."""
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
def _load_rows(start, place, inside):  # type: ignore[no-untyped-def]
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
def _tables(part, table_row, token, column, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of each pair's two values, and cosines and sines, of these tokens.

    All are read as whole rows of the values' shape: loads of another shape would be laid out in another way.
    """
    _, weight, cos, sin, tokens, _, _ = part
    place, inside = token * table_row + column, token < tokens
    of_real, of_imaginary = _pairs(tl.load(tl.broadcast_to(weight + column, place.shape)))
    even, odd = _pairs(_load_rows(cos, place, inside))
    if SPLIT:
        odd, _ = _pairs(_load_rows(sin, place, inside))
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
def _rotate(  # type: ignore[no-untyped-def]
    part, low, table_row, result, block, row_heads,
    EPS: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    RANK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Add `low` to some heads of a block's tokens, normalise and rotate them."""
    values, _, _, _, tokens, stride_token, stride_head = part
    token = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    of_real, of_imaginary, cos, sin, low_left = None, None, None, None, None
    if NORMED:
        of_real, of_imaginary, cos, sin = _tables(part, table_row, token, column, SPLIT)
    values += token * stride_token + column
    result += token * row_heads * WIDTH + column
    if RANK > 0:
        low_left = _low_rows(low, token, inside, RANK)
    for head in range(HEADS):
        whole = _load_rows(values, head * stride_head, inside)
        whole = _with_low(whole, low_left, low, head, WIDTH, RANK)[0]
        if NORMED:
            real, imaginary = _pairs(whole)
            inverse = _inverse(real, imaginary, EPS)
            real, imaginary = real * inverse * of_real, imaginary * inverse * of_imaginary
            whole = _whole(real * cos - imaginary * sin, imaginary * cos + real * sin)
        tl.store(result + head * WIDTH, whole, mask=inside)


@triton.jit
def _rotate_back(  # type: ignore[no-untyped-def]
    part, low, of_hidden, table_row, given, result, block, row_heads,
    EPS: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    RANK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Gradients of the values of `_rotate` and, from these heads, of `hidden`, given that of its result."""
    values, _, _, _, tokens, stride_token, stride_head = part
    gradient, gradient_token, gradient_head = given
    token = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    of_real, of_imaginary, cos, sin, low_left, found = None, None, None, None, None, None
    if NORMED:
        of_real, of_imaginary, cos, sin = _tables(part, table_row, token, column, SPLIT)
    values += token * stride_token + column
    gradient += token * gradient_token + column
    result += token * row_heads * WIDTH + column
    if RANK > 0:
        found = tl.zeros((RANK, TOKENS), dtype=tl.float32)
        if NORMED:
            low_left = _low_rows(low, token, inside, RANK)
    for head in range(HEADS):
        if NORMED:
            whole = _load_rows(values, head * stride_head, inside)
            whole, low_right = _with_low(whole, low_left, low, head, WIDTH, RANK)
            real, imaginary = _pairs(whole)
            left, right = _pairs(_load_rows(gradient, head * gradient_head, inside))
            inverse = _inverse(real, imaginary, EPS)
            real, imaginary = real * inverse, imaginary * inverse
            left, right = (left * cos + right * sin) * of_real, (right * cos - left * sin) * of_imaginary
            mean = tl.sum(left * real + right * imaginary, 1, keep_dims=True) / WIDTH
            changed = _whole((left - real * mean) * inverse, (right - imaginary * mean) * inverse)
        else:
            changed = _load_rows(gradient, head * gradient_head, inside)
            low_right = _low_columns(low, head, WIDTH, RANK) if RANK > 0 else None
        tl.store(result + head * WIDTH, changed, mask=inside)
        if RANK > 0:
            # rounded as it is stored: that is what the gradient of the right side is made of
            found = tl.dot(low_right, tl.trans(changed.to(low_right.dtype)), found)
    if RANK > 0:
        # this way round, warps share a product's tokens, of which there are more than ranks
        pointer, stride = of_hidden
        place = tl.trans(token * stride) + tl.arange(0, RANK)[:, None]
        tl.store(pointer + place, found, mask=tl.broadcast_to(tl.trans(inside), place.shape))


@triton.jit
def _part(which, stream, sample, head, heads, QKV: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A stream from a program's sample and head on, among queries, keys or values; strides of a joint product
    are those of its shape.
    """
    values, weight, key_weight, cos, sin, tokens, stride_batch, stride_token, stride_head = stream
    if QKV:
        if which == 1:
            weight = key_weight
        row = 3 * heads * WIDTH
        values += sample * tokens * row + (which * heads + head) * WIDTH
        return values, weight, cos, sin, tokens, row, WIDTH
    else:
        values += sample * stride_batch + head * stride_head
        return values, weight, cos, sin, tokens, stride_token, stride_head


@triton.jit
def _low(which, low, tokens, sample, column):  # type: ignore[no-untyped-def]
    """A stream's low-rank addend, from the same sample and column of the product on."""
    hidden, up, rank = low
    return hidden + (sample * tokens * 3 + which) * rank, up + (column * 3 + which) * rank, rank


@triton.jit
def stream_forward(  # type: ignore[no-untyped-def]
    which, stream, low, sample, head, table_row, result, block, heads,
    EPS: tl.constexpr, QKV: tl.constexpr, JOINED: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program's work in the stream that its block belongs to; `result` begins at its sample and head."""
    part = _part(which, stream, sample, head, heads, QKV, WIDTH)
    _, _, _, _, _, tokens, _, _, _ = stream
    low = _low(which, low, tokens, sample, (which * heads + head) * WIDTH)
    if which < 2:
        _rotate(part, low, table_row, result, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS, RANK, True)
    elif QKV and JOINED:
        _rotate(part, low, table_row, result, block, heads, EPS, SPLIT, WIDTH, TOKENS, HEADS, RANK, False)


@triton.jit
def stream_backward(  # type: ignore[no-untyped-def]
    which, stream, low, sample, head, table_row, given, result, of_hidden, block, heads, row_heads,
    EPS: tl.constexpr, QKV: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program's work backward. The stride of `result` is an argument of its own: a stride out of `_part`
    would let torch conclude that the kernel writes all tensors of the stream.
    """
    part = _part(which, stream, sample, head, heads, QKV, WIDTH)
    _, _, _, _, _, tokens, _, _, _ = stream
    low = _low(which, low, tokens, sample, (which * heads + head) * WIDTH)
    if which < 2:
        _rotate_back(
            part, low, of_hidden, table_row, given, result, block, row_heads,
            EPS, SPLIT, WIDTH, TOKENS, HEADS, RANK, True,
        )  # fmt: skip
    elif QKV:
        _rotate_back(
            part, low, of_hidden, table_row, given, result, block, row_heads,
            EPS, SPLIT, WIDTH, TOKENS, HEADS, RANK, False,
        )  # fmt: skip
