"""Triton kernel for CUDA: a low-rank product added to a layer's output.

Imported only where torch was built for CUDA. Program (i, j) makes a tile of the result, all contiguous:

                      result      whole       hidden             up
    rows, columns     [ tile ] = [ tile ] + [ ROWS x rank ] @ [ COLUMNS x rank ].T

    whole (rows, columns), hidden (rows, rank), up (columns, rank); RANK is a power of two from 16 on that is
    at least the rank, beyond which zeros are read. The sum is made in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

MOST_RANK = 128
_ROWS, _COLUMNS = 64, 256


@triton_op("trainer::add_low_rank", mutates_args={})
def add_low_rank(whole: torch.Tensor, hidden: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `low_rank.add_low_rank`; all contiguous, at most `MOST_RANK` columns in `hidden`."""
    rows, columns = whole.shape
    rank = hidden.shape[1]
    result = torch.empty((rows, columns), dtype=whole.dtype, device=whole.device)
    wrap_triton(_add_low_rank)[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))](
        whole, hidden, up, result, rows, columns, rank,
        RANK=max(16, triton.next_power_of_2(rank)), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8,
    )  # fmt: skip
    return result


@triton.jit
def _add_low_rank(  # type: ignore[no-untyped-def]
    whole, hidden, up, result, rows, columns, rank,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
