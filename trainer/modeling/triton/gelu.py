"""Triton kernels for CUDA that quantise what a feed-forward has between its linears, in one pass.

GELU and its gradient are computed where rows become FP8, so that neither is ever written in the wider type.
Imported as `kernels` is, and for the same reason.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from trainer.modeling.triton.fp8_rows import greater, largest_of, parts, store_padding, store_part, warps


@triton_op("trainer::gelu_quantize_rows", mutates_args={})
def gelu_quantize_rows(
    left: torch.Tensor | None, values: torch.Tensor, most: float, least: float, padded: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `feedforward.gelu_quantize_rows`; both of any stride but the last, which is 1, and of one type.

    The results have `padded` rows, as those of `kernels.quantize_rows`.
    """
    rows = values.shape[0]
    first = 0 if left is None else left.shape[1]
    columns = first + values.shape[1]
    quantized = torch.empty((padded, columns), dtype=torch.float8_e4m3fn, device=values.device)
    scale = torch.empty((padded, 1), dtype=torch.float32, device=values.device)
    wrap_triton(_gelu_quantize)[(padded,)](
        values if left is None else left,
        values,
        quantized,
        scale,
        0 if left is None else left.stride(0),
        values.stride(0),
        first,
        rows,
        columns,
        MOST=most,
        LEAST=least,
        JOINED=left is not None,
        **parts(columns),
        num_warps=warps(columns),
    )
    return quantized, scale


@triton_op("trainer::gelu_backward_quantize_rows", mutates_args={})
def gelu_backward_quantize_rows(
    gradient: torch.Tensor,
    values: torch.Tensor,
    column_scale: torch.Tensor,
    most: float,
    least: float,
    padded: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `feedforward.gelu_backward_quantize_rows`; the first two of any stride but the last, which is 1.

    The results have `padded` rows, as those of `kernels.quantize_rows`.
    """
    rows, columns = values.shape
    quantized = torch.empty((padded, columns), dtype=torch.float8_e4m3fn, device=values.device)
    scale = torch.empty((padded, 1), dtype=torch.float32, device=values.device)
    wrap_triton(_gelu_backward_quantize)[(padded,)](
        gradient,
        values,
        column_scale,
        quantized,
        scale,
        gradient.stride(0),
        values.stride(0),
        rows,
        columns,
        MOST=most,
        LEAST=least,
        **parts(columns),
        num_warps=warps(columns),
    )
    return quantized, scale


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


@triton.jit
def _activated(  # type: ignore[no-untyped-def]
    left, values, column, first, columns, JOINED: tl.constexpr, EXACT: tl.constexpr
):
    """These columns of [left, gelu(values)] in fp32, rounded as they would be stored; zeros beyond it."""
    if JOINED:
        inside = (column >= first) & (column < columns)
        value = tl.load(values + (column - first), mask=inside, other=0.0).to(tl.float32)
        value = _gelu(value).to(values.dtype.element_ty).to(tl.float32)
        beside = tl.load(left + column, mask=column < first, other=0.0).to(tl.float32)
        value = tl.where(column < first, beside, value)
    elif EXACT:
        value = _gelu(tl.load(values + column).to(tl.float32)).to(values.dtype.element_ty).to(tl.float32)
    else:
        value = tl.load(values + column, mask=column < columns, other=0.0).to(tl.float32)
        value = _gelu(value).to(values.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _gelu_quantize(  # type: ignore[no-untyped-def]
    left,
    values,
    quantized,
    scale,
    left_stride,
    values_stride,
    first,
    rows,
    columns,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    JOINED: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    EXACT: tl.constexpr,
    LOOPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < rows:
        _gelu_quantize_row(
            left + row * left_stride,
            values + row * values_stride,
            quantized + row * columns,
            scale + row,
            first,
            columns,
            MOST,
            LEAST,
            JOINED,
            FIRST,
            SECOND,
            EXACT,
            LOOPED,
        )
    else:
        store_padding(quantized + row * columns, scale + row, columns, FIRST)


@triton.jit
def _gelu_quantize_row(  # type: ignore[no-untyped-def]
    left,
    values,
    quantized,
    scale,
    first,
    columns,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    JOINED: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    EXACT: tl.constexpr,
    LOOPED: tl.constexpr,
):
    column = tl.arange(0, FIRST)
    if LOOPED:
        largest = tl.zeros((FIRST,), dtype=tl.float32)
        for start in range(0, columns, FIRST):
            part = _activated(left, values, start + column, first, columns, JOINED, False)
            largest = greater(largest, tl.abs(part))
        factor = greater(largest_of(largest), LEAST) / MOST
        tl.store(scale, factor)
        for start in range(0, columns, FIRST):
            part = _activated(left, values, start + column, first, columns, JOINED, False)
            store_part(quantized, part, 1.0 / factor, start + column, columns, False)
    else:
        part = _activated(left, values, column, first, columns, JOINED, EXACT)
        factor = greater(largest_of(tl.abs(part)), LEAST) / MOST
        if SECOND > 0:
            beyond = FIRST + tl.arange(0, SECOND)
            rest = _activated(left, values, beyond, first, columns, JOINED, EXACT)
            factor = greater(factor, largest_of(tl.abs(rest)) / MOST)
            store_part(quantized, rest, 1.0 / factor, beyond, columns, EXACT)
        tl.store(scale, factor)
        store_part(quantized, part, 1.0 / factor, column, columns, EXACT)


@triton.jit
def _scaled_gradient(gradient, values, column_scale, column, columns, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """These columns of gradient * gelu'(values), rounded as they would be stored, * column_scale."""
    if EXACT:
        value = tl.load(values + column).to(tl.float32)
        given = tl.load(gradient + column).to(tl.float32)
        across = tl.load(column_scale + column)
    else:
        inside = column < columns
        value = tl.load(values + column, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(gradient + column, mask=inside, other=0.0).to(tl.float32)
        across = tl.load(column_scale + column, mask=inside, other=0.0)
    return (given * _gelu_slope(value)).to(gradient.dtype.element_ty).to(tl.float32) * across


@triton.jit
def _gelu_backward_quantize(  # type: ignore[no-untyped-def]
    gradient,
    values,
    column_scale,
    quantized,
    scale,
    gradient_stride,
    values_stride,
    rows,
    columns,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    EXACT: tl.constexpr,
    LOOPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < rows:
        _gelu_backward_quantize_row(
            gradient + row * gradient_stride,
            values + row * values_stride,
            column_scale,
            quantized + row * columns,
            scale + row,
            columns,
            MOST,
            LEAST,
            FIRST,
            SECOND,
            EXACT,
            LOOPED,
        )
    else:
        store_padding(quantized + row * columns, scale + row, columns, FIRST)


@triton.jit
def _gelu_backward_quantize_row(  # type: ignore[no-untyped-def]
    gradient,
    values,
    column_scale,
    quantized,
    scale,
    columns,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    EXACT: tl.constexpr,
    LOOPED: tl.constexpr,
):
    column = tl.arange(0, FIRST)
    if LOOPED:
        largest = tl.zeros((FIRST,), dtype=tl.float32)
        for start in range(0, columns, FIRST):
            part = _scaled_gradient(gradient, values, column_scale, start + column, columns, False)
            largest = greater(largest, tl.abs(part))
        factor = greater(largest_of(largest), LEAST) / MOST
        tl.store(scale, factor)
        for start in range(0, columns, FIRST):
            part = _scaled_gradient(gradient, values, column_scale, start + column, columns, False)
            store_part(quantized, part, 1.0 / factor, start + column, columns, False)
    else:
        part = _scaled_gradient(gradient, values, column_scale, column, columns, EXACT)
        factor = greater(largest_of(tl.abs(part)), LEAST) / MOST
        if SECOND > 0:
            beyond = FIRST + tl.arange(0, SECOND)
            rest = _scaled_gradient(gradient, values, column_scale, beyond, columns, EXACT)
            factor = greater(factor, largest_of(tl.abs(rest)) / MOST)
            store_part(quantized, rest, 1.0 / factor, beyond, columns, EXACT)
        tl.store(scale, factor)
        store_part(quantized, part, 1.0 / factor, column, columns, EXACT)
