"""Triton kernels for CUDA: rows to FP8 in one pass, and other passes over matrices of one byte a value.

Only imported where torch was built for CUDA, whose wheels bring Triton. torch's own transpose of bytes takes
as long as the product that it feeds, and a compiler that sees the arithmetic of `quantize_rows` fuses it with
what comes before: it then reads every row two or three times.

`_quantize`: program r makes row r of the result, which is one of `rows` or padding of zeros.

    beside     [ 0 .. first )               row r begins at r * beside_stride
    values     [ first .. columns )         row r begins at r * values_stride; at r * columns for WAY 0
                     |  GELU, * column_scale
    registers  [ FIRST ][ SECOND ]          powers of two, all columns; or FIRST at a time, twice (LOOPED)
                     |  / scale
    quantized  [ 0 .. columns ) of e4m3     row r begins at r * columns
    scale      [ 1 ] of fp32                largest absolute value / MOST, at least LEAST / MOST

    column_scale  (columns,) fp32
    WAY    0: values, * column_scale where TWO; `first` is 0
           1: beside where TWO, then gelu(values); of one type, to which GELU is rounded
           2: beside * gelu'(values), rounded likewise, * column_scale; `beside` is the gradient, `first` is 0
    EXACT  FIRST + SECOND are `columns`: nothing is masked

`_transpose`: program (i, j) turns a tile of TILE x TILE bytes. `_transpose_words`, for a multiple of 4 rows,
reads a tile as four, whose rows are every fourth of its own: a thread has the four bytes of a word of the
result, and words turn in shared memory. `_unpack`: program (r, j) multiplies BLOCK bytes of row r of a
matrix (rows, columns), int8 or e4m3, by its scale.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

_TILE, _UNPACKED = 128, 2048
# values of a row that one program holds in registers; longer rows are read twice
MOST_HELD = 16384
# columns up to which one part is as fast as two
MOST_NARROW = 4096
WAYS = ("plain", "gelu", "gelu_backward")


@triton_op("trainer::quantize_rows", mutates_args={})
def quantize_rows(
    values: torch.Tensor,
    beside: torch.Tensor | None,
    column_scale: torch.Tensor | None,
    way: str,
    most: float,
    least: float,
    padded: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fp8.quantize_rows`, where `values` are contiguous, and `feedforward`, where rows lie in one piece.

    The results have `padded` rows: those beyond `rows` are zeros with a scale of 1.
    """
    columns = values.shape[1]
    if way == "gelu" and beside is not None:
        columns += beside.shape[1]
    quantized = torch.empty((padded, columns), dtype=torch.float8_e4m3fn, device=values.device)
    scale = torch.empty((padded, 1), dtype=torch.float32, device=values.device)
    _launch(wrap_triton(_quantize), values, beside, column_scale, way, most, least, quantized, scale)
    return quantized, scale


def quantize_rows_into(
    values: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor, most: float, least: float
) -> None:
    """Quantise contiguous `values` into tensors that exist, outside of compiled code."""
    _launch(_quantize, values, None, None, "plain", most, least, quantized, scale)


def _launch(
    kernel: Any,
    values: torch.Tensor,
    beside: torch.Tensor | None,
    column_scale: torch.Tensor | None,
    way: str,
    most: float,
    least: float,
    quantized: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    rows, (padded, columns) = values.shape[0], quantized.shape
    first = columns - values.shape[1]
    other = values if beside is None else beside
    # a program's part or two parts are powers of two that leave few lanes idle: three quarters of a power of
    # two, as widths are, would leave a quarter of its lanes with nothing to do
    one, two = min(triton.next_power_of_2(columns), MOST_HELD), 0
    if MOST_NARROW < columns < one:
        one, two = one // 2, triton.next_power_of_2(columns - one // 2)
    kernel[(padded,)](
        values, other, values if column_scale is None else column_scale, quantized, scale,
        values.stride(0), other.stride(0), first, rows, columns,
        MOST=most, LEAST=least, WAY=WAYS.index(way),
        TWO=(column_scale if way == "plain" else beside) is not None,
        FIRST=one, SECOND=two, EXACT=one + two == columns, LOOPED=columns > one + two,
        num_warps=4 if columns <= MOST_NARROW else 8 if columns <= MOST_HELD else 16,
    )  # fmt: skip


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]
    values, beside, column_scale, quantized, scale, values_stride, beside_stride, first, rows, columns,
    MOST: tl.constexpr, LEAST: tl.constexpr, WAY: tl.constexpr, TWO: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, EXACT: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if WAY == 0:
        values_stride = columns  # one stride for both matrices takes fewer registers
    if row < rows:
        _quantize_row(
            values + row * values_stride, beside + row * beside_stride, column_scale,
            quantized + row * columns, scale + row, first, columns,
            MOST, LEAST, WAY, TWO, FIRST, SECOND, EXACT, LOOPED,
        )  # fmt: skip
    else:
        # finite, and nothing in any sum
        zeros = tl.zeros((FIRST,), dtype=tl.float32)
        for start in range(0, columns, FIRST):
            _store_part(quantized + row * columns, zeros, 1.0, start + tl.arange(0, FIRST), columns, False)
        tl.store(scale + row, 1.0)


@triton.jit
def _quantize_row(  # type: ignore[no-untyped-def]
    values, beside, column_scale, quantized, scale, first, columns,
    MOST: tl.constexpr, LEAST: tl.constexpr, WAY: tl.constexpr, TWO: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, EXACT: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, FIRST)
    if LOOPED:
        largest = tl.zeros((FIRST,), dtype=tl.float32)
        for start in range(0, columns, FIRST):
            part = _part(values, beside, column_scale, start + column, first, columns, WAY, TWO, False)
            largest = greater(largest, tl.abs(part))
        factor = greater(_largest_of(largest), LEAST) / MOST
        tl.store(scale, factor)
        for start in range(0, columns, FIRST):
            part = _part(values, beside, column_scale, start + column, first, columns, WAY, TWO, False)
            _store_part(quantized, part, 1.0 / factor, start + column, columns, False)
    else:
        part = _part(values, beside, column_scale, column, first, columns, WAY, TWO, EXACT)
        factor = greater(_largest_of(tl.abs(part)), LEAST) / MOST
        if SECOND > 0:
            beyond = FIRST + tl.arange(0, SECOND)
            rest = _part(values, beside, column_scale, beyond, first, columns, WAY, TWO, EXACT)
            factor = greater(factor, _largest_of(tl.abs(rest)) / MOST)
            _store_part(quantized, rest, 1.0 / factor, beyond, columns, EXACT)
        tl.store(scale, factor)
        _store_part(quantized, part, 1.0 / factor, column, columns, EXACT)


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    values, beside, column_scale, column, first, columns,
    WAY: tl.constexpr, TWO: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """These columns of a row to be quantised, in fp32; zeros beyond it."""
    if WAY == 0:
        part = _load(values, column, columns, EXACT).to(tl.float32)
        if TWO:
            part *= _load(column_scale, column, columns, EXACT)
    elif WAY == 2:
        value = _load(values, column, columns, EXACT).to(tl.float32)
        given = _load(beside, column, columns, EXACT).to(tl.float32)
        across = _load(column_scale, column, columns, EXACT)
        part = (given * _gelu_slope(value)).to(beside.dtype.element_ty).to(tl.float32) * across
    elif TWO:
        inside = (column >= first) & (column < columns)
        part = tl.load(values + (column - first), mask=inside, other=0.0).to(tl.float32)
        part = _gelu(part).to(values.dtype.element_ty).to(tl.float32)
        left = tl.load(beside + column, mask=column < first, other=0.0).to(tl.float32)
        part = tl.where(column < first, left, part)
    else:
        part = _gelu(_load(values, column, columns, EXACT).to(tl.float32))
        part = part.to(values.dtype.element_ty).to(tl.float32)
    return part


@triton.jit
def _load(row, column, columns, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    if EXACT:
        return tl.load(row + column)
    else:
        return tl.load(row + column, mask=column < columns, other=0.0)


@triton.jit
def _store_part(quantized, part, inverse, column, columns, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """These columns of a row as FP8."""
    if EXACT:
        tl.store(quantized + column, (part * inverse).to(tl.float8e4nv))
    else:
        tl.store(quantized + column, (part * inverse).to(tl.float8e4nv), mask=column < columns)


@triton.jit
def greater(left, right):  # type: ignore[no-untyped-def]
    """NaN where one of both is."""
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest_of(part):  # type: ignore[no-untyped-def]
    """NaN where one value is."""
    return tl.reduce(part, 0, greater)


# GELU is value * sigmoid(2 u) with u = sqrt(2 / pi) (value + 0.044715 value^3), as sigmoid(2 u) is half of
# 1 + tanh(u). The reciprocal in it is a squared root: a division has steps for a range that is not needed.


@triton.jit
def _decay(value):  # type: ignore[no-untyped-def]
    """exp(-2 u); the constants have log2(e) in them."""
    return tl.exp2(value * (-2.302208198144325 - 0.1029432395800235 * value * value))


@triton.jit
def _gelu(value):  # type: ignore[no-untyped-def]
    root = tl.rsqrt(1.0 + _decay(value))
    return value * (root * root)


@triton.jit
def _gelu_slope(value):  # type: ignore[no-untyped-def]
    """By the size of `value`, so that nothing cancels: both sides of the sigmoid are products."""
    decay = _decay(tl.abs(value))
    root = tl.rsqrt(1.0 + decay)
    most = root * root
    least = decay * most
    # 2 u' = 2 sqrt(2 / pi) (1 + 3 * 0.044715 value^2)
    steep = 1.5957691216057308 + 0.2140644488144545 * value * value
    return tl.where(value < 0, least, most) + value * (most * least) * steep


@triton_op("trainer::transpose_bytes", mutates_args={})
def transpose_bytes(matrix: torch.Tensor) -> torch.Tensor:
    """(rows, columns) of bytes as a contiguous (columns, rows)."""
    rows, columns = matrix.shape
    result = torch.empty((columns, rows), dtype=torch.uint8, device=matrix.device)
    _launch_transpose(wrap_triton(_transpose if rows % 4 else _transpose_words), matrix, result)
    return result


def transpose_bytes_into(matrix: torch.Tensor, result: torch.Tensor) -> None:
    """Write (rows, columns) of bytes into a contiguous (columns, rows), outside of compiled code."""
    _launch_transpose(_transpose if len(matrix) % 4 else _transpose_words, matrix, result)


def _launch_transpose(kernel: Any, matrix: torch.Tensor, result: torch.Tensor) -> None:
    rows, columns = matrix.shape
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    kernel[grid](matrix, result, rows, columns, TILE=_TILE, num_warps=8 if rows % 4 == 0 else 4)


@triton.jit
def _transpose(source, target, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(source + row[:, None] * columns + column[None, :], mask=inside)
    inside = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(target + column[:, None] * rows + row[None, :], tl.trans(tile), mask=inside)


@triton.jit
def _transpose_words(source, target, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    quad = tl.program_id(0) * (TILE // 4) + tl.arange(0, TILE // 4)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    words = rows // 4
    inside = (quad < words)[:, None] & (column < columns)[None, :]
    start = source + quad.to(tl.int64)[:, None] * (4 * columns) + column[None, :]
    first = tl.load(start, mask=inside, other=0)
    second = tl.load(start + columns, mask=inside, other=0)
    third = tl.load(start + 2 * columns, mask=inside, other=0)
    fourth = tl.load(start + 3 * columns, mask=inside, other=0)
    word = tl.trans(packed(first, second, third, fourth))
    inside = (column < columns)[:, None] & (quad < words)[None, :]
    place = column.to(tl.int64)[:, None] * words + quad[None, :]
    tl.store(target.to(tl.pointer_type(tl.int32), bitcast=True) + place, word, mask=inside)


@triton.jit
def packed(first, second, third, fourth):  # type: ignore[no-untyped-def]
    """Four bytes as a word, in their order in memory."""
    word = first.to(tl.int32) | (second.to(tl.int32) << 8)
    return word | (third.to(tl.int32) << 16) | (fourth.to(tl.int32) << 24)


def unpack_rows(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(rows, columns) of int8 with an fp32 scale (rows, 1), multiplied in fp32, in `dtype`."""
    return _unpacked(_unpack, values, scale, dtype)


@triton_op("trainer::unpack_fp8_rows", mutates_args={})
def unpack_fp8_rows(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same of e4m3, also in compiled code."""
    return _unpacked(wrap_triton(_unpack), values, scale, dtype)


def _unpacked(kernel: Any, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, columns = values.shape
    result = torch.empty((rows, columns), dtype=dtype, device=values.device)
    grid = (rows, triton.cdiv(columns, _UNPACKED))
    kernel[grid](values, scale, result, columns, BLOCK=_UNPACKED, num_warps=4)
    return result


@triton.jit
def _unpack(values, scale, result, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    part = tl.load(values + row * columns + column, mask=inside).to(tl.float32)
    tl.store(result + row * columns + column, part * tl.load(scale + row), mask=inside)
