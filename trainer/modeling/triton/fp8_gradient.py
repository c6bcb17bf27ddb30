"""Triton kernels for CUDA: a gradient to FP8 by rows and by columns at once, and its sum over rows.

Only imported where torch was built for CUDA. A scale of a column is known when all rows were read, and one of
a row when all columns were: the gradient is read twice, first for the scales and then for the bytes of both
layouts, and nothing of its size exists in between.

    gradient      (rows, columns) bf16 or fp32, contiguous; columns are a multiple of 16
    column_scale  (columns,) fp32, of a weight's output rows, positive
    row_scale     (at least rows,) fp32, of the inputs' rows, positive
    padded        rows of the results, a multiple of 16: those beyond `rows` are zeros with a scale of 1

`_measure`: program (j, i) goes down STRIPS tiles of ROWS x COLUMNS. Its largest values of columns, and sums,
stay in registers to the end; its largest values of rows leave with each tile.

        columns  j * COLUMNS                         of_rows     (blocks of columns, padded) fp32
             [ tile  ] -> of_rows[j, rows]                       largest |gradient * column_scale|
       rows  [ tile  ] -> of_rows[j, rows]           of_columns  (blocks of rows, columns) fp32
          |  [ tile  ] -> of_rows[j, rows]                       largest |gradient * row_scale|
          v      |                                   sums        (blocks of rows, columns) fp32
                 +-> of_columns[i, columns], sums[i, columns]    only where SUMS

`_finish`: program p takes LINES rows of the results, or, beyond those, LINES columns. It goes through the
blocks, BLOCKS at a time, and writes scale = largest / MOST, at least LEAST / MOST, inverse = 1 / scale, and
the sums. All is in one order: results are bit-equal from run to run.

`_write`: program (j, i) reads a tile as four, which begin at a row each and go down four rows at a time: each
thread holds four values that follow each other down a column, packs their bytes into a word, and words turn
in shared memory, not bytes.

    gradient  (rows, columns)            values  (padded, columns) e4m3, gradient * column_scale * row_inverse
    row 0  [ a0 b0 c0 .. ]               a0 b0 c0 ..     stored along rows
        1  [ a1 b1 c1 .. ]               a1 b1 c1 ..
        2  [ a2 b2 c2 .. ]               ..
        3  [ a3 b3 c3 .. ]
        4  [ a4 ..       ]               turned  (columns, padded) e4m3, gradient * row_scale * column_inverse
                                         a0 a1 a2 a3 | a4 ..     words of four bytes, stored along columns
                                         b0 b1 b2 b3 | b4 ..

    BY_ROW  values and their scales are made; else of_rows, row_inverse and column_scale are not touched

It begins with the rows that `_measure` read last, which the cache may still hold. bf16: 2 + 2 bytes of each
value are read and 1 + 1 written; between the kernels 5 % of that go through the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from trainer.modeling.triton.fp8_rows import greater, packed

# 32 values a thread in 16-byte loads, in both large kernels: registers (94 and 64, no spills, Triton 3.6 for
# Hopper) leave room for five and four programs on a multiprocessor, whose loads are 40 and 64 KB
_ROWS, _COLUMNS, _STRIPS, _WARPS = 32, 128, 8, 4
_LINES, _BLOCKS = 64, 32
_WRITTEN_ROWS, _WRITTEN_COLUMNS, _WRITTEN_WARPS = 64, 128, 8


@triton_op("trainer::quantize_gradient", mutates_args={})
def quantize_gradient(
    gradient: torch.Tensor,
    column_scale: torch.Tensor | None,
    row_scale: torch.Tensor,
    most: float,
    least: float,
    padded: int,
    with_sums: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `storage.fp8_gradient.quantize_gradient`; where `column_scale` is None values and scale are empty.

    Gives values (padded, columns), scale (padded, 1), turned (columns, padded), its scale (columns, 1), and
    sums (columns,), which are empty unless asked for.
    """
    rows, columns = gradient.shape
    by_row, device = column_scale is not None, gradient.device
    lines = padded if by_row else 0
    across, down = triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, _ROWS * _STRIPS)

    def wide(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    values = torch.empty((lines, columns), dtype=torch.float8_e4m3fn, device=device)
    turned = torch.empty((columns, padded), dtype=torch.float8_e4m3fn, device=device)
    scale, turned_scale, sums = wide(lines, 1), wide(columns, 1), wide(columns if with_sums else 0)
    of_columns, turned_inverse = wide(down, columns), wide(columns)
    # a tensor that is not touched stands for one that does not exist
    column_factor = row_scale if column_scale is None else column_scale
    of_rows, inverse = (wide(across, padded), wide(padded)) if by_row else (row_scale, row_scale)
    parts = wide(down, columns) if with_sums else row_scale
    wrap_triton(_measure)[(across, down)](
        gradient, column_factor, row_scale, of_rows, of_columns, parts, rows, columns, padded,
        BY_ROW=by_row, SUMS=with_sums, ROWS=_ROWS, COLUMNS=_COLUMNS, STRIPS=_STRIPS, num_warps=_WARPS,
    )  # fmt: skip
    wrap_triton(_finish)[(triton.cdiv(lines, _LINES) + triton.cdiv(columns, _LINES),)](
        of_rows, of_columns, parts, scale if by_row else row_scale, inverse, turned_scale, turned_inverse,
        sums if with_sums else row_scale, rows, columns, padded, across, down,
        MOST=most, LEAST=least, BY_ROW=by_row, SUMS=with_sums, LINES=_LINES, BLOCKS=_BLOCKS, num_warps=4,
    )  # fmt: skip
    wrap_triton(_write)[(triton.cdiv(columns, _WRITTEN_COLUMNS), triton.cdiv(padded, _WRITTEN_ROWS))](
        gradient, column_factor, row_scale, inverse, turned_inverse, values if by_row else row_scale, turned,
        rows, columns, padded,
        BY_ROW=by_row, QUADS=_WRITTEN_ROWS // 4, COLUMNS=_WRITTEN_COLUMNS, num_warps=_WRITTEN_WARPS,
    )  # fmt: skip
    return values, scale, turned, turned_scale, sums


@triton.jit
def _measure(  # type: ignore[no-untyped-def]
    gradient, column_scale, row_scale, of_rows, of_columns, sums, rows, columns, padded,
    BY_ROW: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * (ROWS * STRIPS) + tl.arange(0, ROWS)
    within = column < columns
    across = tl.zeros((COLUMNS,), dtype=tl.float32)
    if BY_ROW:
        across = tl.load(column_scale + column, mask=within, other=0.0)
    largest = tl.zeros((8, COLUMNS), dtype=tl.float32)
    total = tl.zeros((8, COLUMNS), dtype=tl.float32)
    following = _tile(gradient, first, column, rows, columns)
    for strip in range(STRIPS):
        row = first + strip * ROWS
        tile = following.to(tl.float32)
        # on its way while this one is measured; nothing is read beyond the last row
        following = _tile(gradient, row + ROWS, column, tl.where(strip + 1 < STRIPS, rows, 0), columns)
        if SUMS:
            total += tl.sum(tl.reshape(tile, (ROWS // 8, 8, COLUMNS)), 0)
        tile = tl.abs(tile)
        down = tl.load(row_scale + row, mask=row < rows, other=0.0)
        scaled = tl.reshape(tile * down[:, None], (ROWS // 8, 8, COLUMNS))
        largest = greater(largest, tl.reduce(scaled, 0, greater))
        if BY_ROW:
            most = tl.reduce(tile * across[None, :], 1, greater)
            tl.store(of_rows + tl.program_id(0).to(tl.int64) * padded + row, most, mask=row < rows)
    place = tl.program_id(1).to(tl.int64) * columns + column
    tl.store(of_columns + place, tl.reduce(largest, 0, greater), mask=within)
    if SUMS:
        tl.store(sums + place, tl.sum(total, 0), mask=within)


@triton.jit
def _tile(gradient, row, column, rows, columns):  # type: ignore[no-untyped-def]
    """Values of these rows and columns, zeros beyond the gradient."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(gradient + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    of_rows, of_columns, parts, scale, inverse, turned_scale, turned_inverse, sums,
    rows, columns, padded, across, down,
    MOST: tl.constexpr, LEAST: tl.constexpr, BY_ROW: tl.constexpr, SUMS: tl.constexpr,
    LINES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    own = 0
    if BY_ROW:
        own = tl.cdiv(padded, LINES)
        line = program * LINES + tl.arange(0, LINES)
        if program < own:
            _finish_lines(of_rows, scale, inverse, line, rows, padded, across, MOST, LEAST, LINES, BLOCKS)
    line = (program - own) * LINES + tl.arange(0, LINES)
    if program >= own:
        _finish_lines(
            of_columns, turned_scale, turned_inverse, line, columns, columns, down, MOST, LEAST, LINES, BLOCKS
        )
        if SUMS:
            total = tl.zeros((LINES,), dtype=tl.float32)
            for begin in range(0, down, BLOCKS):
                total += tl.sum(_blocks(parts, line, begin, down, columns, line < columns, BLOCKS), 0)
            tl.store(sums + line, total, mask=line < columns)


@triton.jit
def _finish_lines(  # type: ignore[no-untyped-def]
    found, scale, inverse, line, filled, lines, blocks,
    MOST: tl.constexpr, LEAST: tl.constexpr, LINES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scales of these lines, 1 for those that are not `filled`, from the largest values in all blocks."""
    largest = tl.zeros((LINES,), dtype=tl.float32)
    for begin in range(0, blocks, BLOCKS):
        part = _blocks(found, line, begin, blocks, lines, line < filled, BLOCKS)
        largest = greater(largest, tl.reduce(part, 0, greater))
    factor = tl.where(line < filled, tl.div_rn(greater(largest, LEAST), MOST), 1.0)
    tl.store(scale + line, factor, mask=line < lines)
    tl.store(inverse + line, tl.div_rn(1.0, factor), mask=line < lines)


@triton.jit
def _blocks(found, line, begin, blocks, lines, within, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    block = begin + tl.arange(0, BLOCKS)
    inside = (block < blocks)[:, None] & within[None, :]
    return tl.load(found + block.to(tl.int64)[:, None] * lines + line[None, :], mask=inside, other=0.0)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    gradient, column_scale, row_scale, row_inverse, column_inverse, values, turned, rows, columns, padded,
    BY_ROW: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    quad = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUADS + tl.arange(0, QUADS)
    row = quad * 4
    within = column < columns
    # all are on their way before the first is used: no load passes a store
    first = _tile(gradient, row, column, rows, columns)
    second = _tile(gradient, row + 1, column, rows, columns)
    third = _tile(gradient, row + 2, column, rows, columns)
    fourth = _tile(gradient, row + 3, column, rows, columns)
    own = tl.load(column_inverse + column, mask=within, other=0.0)
    if BY_ROW:
        across = tl.load(column_scale + column, mask=within, other=0.0)
        _store_rows(first, across, row_inverse, values, row, column, columns, padded)
        _store_rows(second, across, row_inverse, values, row + 1, column, columns, padded)
        _store_rows(third, across, row_inverse, values, row + 2, column, columns, padded)
        _store_rows(fourth, across, row_inverse, values, row + 3, column, columns, padded)
    word = packed(
        _bytes(first, row_scale, own, row, rows),
        _bytes(second, row_scale, own, row + 1, rows),
        _bytes(third, row_scale, own, row + 2, rows),
        _bytes(fourth, row_scale, own, row + 3, rows),
    )
    words = padded // 4
    place = column.to(tl.int64)[:, None] * words + quad[None, :]
    inside = within[:, None] & (quad < words)[None, :]
    tl.store(turned.to(tl.pointer_type(tl.int32), bitcast=True) + place, tl.trans(word), mask=inside)


@triton.jit
def _store_rows(  # type: ignore[no-untyped-def]
    tile, across, row_inverse, values, row, column, columns, padded
):
    """Bytes of these rows, with their own scales."""
    down = tl.load(row_inverse + row, mask=row < padded, other=0.0)
    scaled = tile.to(tl.float32) * across[None, :] * down[:, None]
    inside = (row < padded)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(values + place, scaled.to(tl.float8e4nv), mask=inside)


@triton.jit
def _bytes(tile, row_scale, across, row, rows):  # type: ignore[no-untyped-def]
    """Bytes of these rows, with the columns' scales, as whole numbers."""
    down = tl.load(row_scale + row, mask=row < rows, other=0.0)
    scaled = tile.to(tl.float32) * down[:, None] * across[None, :]
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
