"""Triton kernels for CUDA: rows to FP8 in one pass, and the transpose of one-byte matrices.

Only imported where torch was built for CUDA, whose wheels bring Triton. torch's own transpose of bytes takes
as long as the product that it feeds, and a compiler that sees the arithmetic of `quantize_rows` fuses it with
what comes before: it then reads every row two or three times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

_TILE = 128
# values of a row that one program holds in registers; longer rows are read twice
MOST_HELD = 16384
# columns up to which one part is as fast as two
MOST_NARROW = 4096


def parts(columns: int) -> dict[str, int | bool]:
    """How one program holds a row: in one part or two, of powers of two that leave few lanes idle.

    Three quarters of a power of two, as widths are, would leave a quarter of its lanes with nothing to do.
    """
    first = min(triton.next_power_of_2(columns), MOST_HELD)
    second = 0
    if MOST_NARROW < columns < first:
        first //= 2
        second = triton.next_power_of_2(columns - first)
    looped = columns > first + second
    return {"FIRST": first, "SECOND": second, "EXACT": first + second == columns, "LOOPED": looped}


def warps(columns: int) -> int:
    """For one row of so many values."""
    return 4 if columns <= MOST_NARROW else 8 if columns <= MOST_HELD else 16


@triton_op("trainer::quantize_rows", mutates_args={})
def quantize_rows(
    values: torch.Tensor, column_scale: torch.Tensor | None, most: float, least: float, padded: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fp8.quantize_rows`; values (rows, columns), contiguous; the results have `padded` rows.

    Those beyond `rows` are zeros with a scale of 1.
    """
    rows, columns = values.shape
    quantized = torch.empty((padded, columns), dtype=torch.float8_e4m3fn, device=values.device)
    scale = torch.empty((padded, 1), dtype=torch.float32, device=values.device)
    wrap_triton(_quantize)[(padded,)](
        values,
        values if column_scale is None else column_scale,
        quantized,
        scale,
        rows,
        columns,
        MOST=most,
        LEAST=least,
        SCALED=column_scale is not None,
        **parts(columns),
        num_warps=warps(columns),
    )
    return quantized, scale


@triton.jit
def _scaled(values, column_scale, column, columns, SCALED: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """These columns of a row in fp32, * column_scale; zeros beyond it."""
    if EXACT:
        part = tl.load(values + column).to(tl.float32)
        if SCALED:
            part *= tl.load(column_scale + column)
    else:
        part = tl.load(values + column, mask=column < columns, other=0.0).to(tl.float32)
        if SCALED:
            part *= tl.load(column_scale + column, mask=column < columns, other=0.0)
    return part


@triton.jit
def store_part(quantized, part, inverse, column, columns, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """These columns of a row as FP8."""
    if EXACT:
        tl.store(quantized + column, (part * inverse).to(tl.float8e4nv))
    else:
        tl.store(quantized + column, (part * inverse).to(tl.float8e4nv), mask=column < columns)


@triton.jit
def store_padding(  # type: ignore[no-untyped-def]
    quantized, scale, columns, FIRST: tl.constexpr
):
    """A row of zeros with a scale of 1: finite, and nothing in any sum."""
    column = tl.arange(0, FIRST)
    zeros = tl.zeros((FIRST,), dtype=tl.float32)
    for start in range(0, columns, FIRST):
        store_part(quantized, zeros, 1.0, start + column, columns, False)
    tl.store(scale, 1.0)


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]
    values,
    column_scale,
    quantized,
    scale,
    rows,
    columns,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    SCALED: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    EXACT: tl.constexpr,
    LOOPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < rows:
        _quantize_row(
            values + row * columns,
            column_scale,
            quantized + row * columns,
            scale + row,
            columns,
            MOST,
            LEAST,
            SCALED,
            FIRST,
            SECOND,
            EXACT,
            LOOPED,
        )
    else:
        store_padding(quantized + row * columns, scale + row, columns, FIRST)


@triton.jit
def _quantize_row(  # type: ignore[no-untyped-def]
    values,
    column_scale,
    quantized,
    scale,
    columns,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    SCALED: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    EXACT: tl.constexpr,
    LOOPED: tl.constexpr,
):
    column = tl.arange(0, FIRST)
    if LOOPED:
        largest = tl.zeros((FIRST,), dtype=tl.float32)
        for first in range(0, columns, FIRST):
            part = _scaled(values, column_scale, first + column, columns, SCALED, False)
            largest = greater(largest, tl.abs(part))
        factor = greater(largest_of(largest), LEAST) / MOST
        tl.store(scale, factor)
        for first in range(0, columns, FIRST):
            part = _scaled(values, column_scale, first + column, columns, SCALED, False)
            store_part(quantized, part, 1.0 / factor, first + column, columns, False)
    else:
        part = _scaled(values, column_scale, column, columns, SCALED, EXACT)
        factor = greater(largest_of(tl.abs(part)), LEAST) / MOST
        if SECOND > 0:
            beyond = FIRST + tl.arange(0, SECOND)
            rest = _scaled(values, column_scale, beyond, columns, SCALED, EXACT)
            factor = greater(factor, largest_of(tl.abs(rest)) / MOST)
            store_part(quantized, rest, 1.0 / factor, beyond, columns, EXACT)
        tl.store(scale, factor)
        store_part(quantized, part, 1.0 / factor, column, columns, EXACT)


@triton.jit
def greater(left, right):  # type: ignore[no-untyped-def]
    """NaN where one of both is."""
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(part):  # type: ignore[no-untyped-def]
    """NaN where one value is."""
    return tl.reduce(part, 0, greater)


@triton_op("trainer::transpose_bytes", mutates_args={})
def transpose_bytes(matrix: torch.Tensor) -> torch.Tensor:
    """(rows, columns) of bytes as a contiguous (columns, rows)."""
    rows, columns = matrix.shape
    result = torch.empty((columns, rows), dtype=torch.uint8, device=matrix.device)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    wrap_triton(_transpose)[grid](matrix, result, rows, columns, TILE=_TILE, num_warps=4)
    return result


@triton.jit
def _transpose(source, target, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(source + row[:, None] * columns + column[None, :], mask=inside)
    inside = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(target + column[:, None] * rows + row[None, :], tl.trans(tile), mask=inside)


def unpack_rows(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(rows, columns) of int8 with an fp32 scale (rows, 1), multiplied in fp32, in `dtype`."""
    rows, columns = values.shape
    result = torch.empty((rows, columns), dtype=dtype, device=values.device)
    _unpack[(rows, triton.cdiv(columns, _UNPACKED))](
        values, scale, result, columns, BLOCK=_UNPACKED, num_warps=4
    )
    return result


_UNPACKED = 2048


@triton.jit
def _unpack(values, scale, result, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    part = tl.load(values + row * columns + column, mask=inside, other=0).to(tl.float32)
    tl.store(result + row * columns + column, part * tl.load(scale + row), mask=inside)


# rows of one head that one program normalises, forward and backward
_HEADS, _HEADS_BACKWARD = 32, 16


@triton_op("trainer::head_norm", mutates_args={})
def head_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norms.head_norm`; values (batch, tokens, heads, width) of any strides but the last, which is 1."""
    batch, tokens, heads, width = values.shape
    result = torch.empty((batch, tokens, heads, width), dtype=values.dtype, device=values.device)
    rows = batch * tokens * heads
    wrap_triton(_head_norm)[(triton.cdiv(rows, _HEADS),)](
        values,
        weight,
        result,
        rows,
        tokens,
        heads,
        values.stride(0),
        values.stride(1),
        values.stride(2),
        EPS=eps,
        WIDTH=width,
        ROWS=_HEADS,
        num_warps=4,
    )
    return result


@triton_op("trainer::head_norm_backward", mutates_args={})
def head_norm_backward(
    gradient: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Gradient of `head_norm` for its values; `gradient` is contiguous."""
    batch, tokens, heads, width = values.shape
    result = torch.empty((batch, tokens, heads, width), dtype=values.dtype, device=values.device)
    rows = batch * tokens * heads
    wrap_triton(_head_norm_backward)[(triton.cdiv(rows, _HEADS_BACKWARD),)](
        gradient,
        values,
        weight,
        result,
        rows,
        tokens,
        heads,
        values.stride(0),
        values.stride(1),
        values.stride(2),
        EPS=eps,
        WIDTH=width,
        ROWS=_HEADS_BACKWARD,
        num_warps=4,
    )
    return result


@triton.jit
def _head_norm(  # type: ignore[no-untyped-def]
    values,
    weight,
    result,
    rows,
    tokens,
    heads,
    stride_batch,
    stride_token,
    stride_head,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    token = row // heads
    start = (token // tokens) * stride_batch + (token % tokens) * stride_token + (row % heads) * stride_head
    column = tl.arange(0, WIDTH)[None, :]
    value = tl.load(values + start[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + EPS)
    scale = tl.load(weight + column).to(tl.float32)
    tl.store(result + row[:, None] * WIDTH + column, value * inverse[:, None] * scale, mask=inside)


@triton.jit
def _head_norm_backward(  # type: ignore[no-untyped-def]
    gradient,
    values,
    weight,
    result,
    rows,
    tokens,
    heads,
    stride_batch,
    stride_token,
    stride_head,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    token = row // heads
    start = (token // tokens) * stride_batch + (token % tokens) * stride_token + (row % heads) * stride_head
    column = tl.arange(0, WIDTH)[None, :]
    value = tl.load(values + start[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + EPS)[:, None]
    unit = value * inverse
    given = tl.load(gradient + row[:, None] * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    given *= tl.load(weight + column).to(tl.float32)
    mean = tl.sum(given * unit, 1)[:, None] / WIDTH
    tl.store(result + row[:, None] * WIDTH + column, (given - unit * mean) * inverse, mask=inside)


@triton_op("trainer::add_low_rank", mutates_args={})
def add_low_rank(whole: torch.Tensor, hidden: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `low_rank.add_low_rank`; all contiguous, at most `MOST_RANK` columns in `hidden`."""
    rows, columns = whole.shape
    rank = hidden.shape[1]
    result = torch.empty((rows, columns), dtype=whole.dtype, device=whole.device)
    grid = (triton.cdiv(rows, _SUM_ROWS), triton.cdiv(columns, _SUM_COLUMNS))
    wrap_triton(_add_low_rank)[grid](
        whole,
        hidden,
        up,
        result,
        rows,
        columns,
        rank,
        RANK=max(16, triton.next_power_of_2(rank)),
        ROWS=_SUM_ROWS,
        COLUMNS=_SUM_COLUMNS,
        num_warps=8,
    )
    return result


MOST_RANK = 128
_SUM_ROWS, _SUM_COLUMNS = 64, 256


@triton.jit
def _add_low_rank(  # type: ignore[no-untyped-def]
    whole,
    hidden,
    up,
    result,
    rows,
    columns,
    rank,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, RANK)
    row_inside, column_inside = (row < rows)[:, None], (column < columns)[None, :]
    left = tl.load(
        hidden + row[:, None] * rank + inner[None, :], mask=row_inside & (inner < rank)[None, :], other=0.0
    )
    right = tl.load(
        up + column[None, :].to(tl.int64) * rank + inner[:, None],
        mask=column_inside & (inner < rank)[:, None],
        other=0.0,
    )
    place = row[:, None] * columns + column[None, :]
    value = tl.load(whole + place, mask=row_inside & column_inside, other=0.0)
    tl.store(result + place, value + tl.dot(left, right), mask=row_inside & column_inside)
