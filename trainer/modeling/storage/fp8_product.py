"""Matrix products with a frozen weight in FP8 (e4m3), forward and for the gradient of the input.

The weight is quantised once, one scale an output row; activations and gradients as they come, one scale a
token. The gradient is multiplied by the weight's scales before it is quantised, because these lie along the
axis that is summed: so forward and backward use the same bytes, in two layouts. FP8 tensor cores read both
operands along the summed axis, and backward sums over the rows of the weight: it needs them transposed, by a
copy that stays (fast) or one that is made anew each time (small).
"""

from __future__ import annotations

from typing import Any

import torch

if torch.version.cuda is not None:
    from trainer.modeling.triton import fp8_rows

MOST = 448.0
"""Largest value of e4m3."""
MULTIPLE = 16
"""Both sides of a weight must be multiples of this for the FP8 kernels."""
ROW_MULTIPLE = 64
"""A GPU's products have a multiple of so many rows: cuBLAS refuses 1 to 48 rows where the inner side is long
(12288 of 3072 x 12288, on an H200 with torch 2.11) with CUBLAS_STATUS_NOT_SUPPORTED: `python -m bench rows`.
"""
# a row whose values are all smaller is scaled as if this were the largest: zeros have no scale of their own.
# Gradients of a mean over all pixels, times a weight's scales, are small: this is below all of them, and its
# scale and the reciprocal of that are normal numbers of fp32 still
LEAST = 1e-30


def padded_rows(rows: int) -> int:
    """Number of rows of a product on a GPU whose caller has `rows`."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def quantize_rows(
    values: torch.Tensor, column_scale: torch.Tensor | None = None, *, pad: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, N) as e4m3 with an fp32 scale (rows, 1), so that values [* column_scale] = quantised * scale.

    `column_scale` is (N,) fp32. What is not finite makes its whole row NaN: a bad step is seen, not hidden.
    `pad` is for a side of a product: on a GPU there are `padded_rows` then, zeros beyond those of `values`.
    """
    if values.device.type != "cpu":
        rows = padded_rows(values.shape[0]) if pad else values.shape[0]
        return fp8_rows.quantize_rows(values.contiguous(), None, column_scale, "plain", MOST, LEAST, rows)
    wide = values.float() if column_scale is None else values.float() * column_scale
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scale = largest.clamp(min=LEAST) / MOST
    # one division a row, like the kernels
    return (wide * (1.0 / scale)).to(torch.float8_e4m3fn), scale


def quantize_rows_into(values: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor) -> None:
    """`quantize_rows` into tensors that exist, outside of compiled code."""
    if values.device.type != "cpu":
        fp8_rows.quantize_rows_into(values.contiguous(), quantized, scale, MOST, LEAST)
        return
    found, own = quantize_rows(values)
    quantized.copy_(found)
    scale.copy_(own)


def unpack_rows(quantized: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(rows, N) of e4m3 times scale (rows, 1), multiplied in fp32, in `dtype`."""
    if quantized.device.type != "cpu":
        return fp8_rows.unpack_fp8_rows(quantized, scale, dtype)
    return (quantized.float() * scale).to(dtype)


def fp8_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: torch.Tensor | None,
) -> torch.Tensor:
    """inputs (..., in) @ weight (out, in).T + bias (out,), in the inputs' dtype, by FP8 tensor cores.

    `weight` is e4m3 with `scale` (out, 1) fp32, `transposed` its copy (in, out) or None. The inputs alone
    have a gradient; nothing of them is kept for it. On a CPU the products are computed in fp32 from the
    same quantised values.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    output: torch.Tensor = _Linear.apply(rows, weight, scale, bias, transposed)
    return output.reshape(*inputs.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight if transposed is None else transposed, scale)
        ctx.is_transposed = transposed is not None
        quantized, row_scale = quantize_rows(inputs, pad=True)
        return multiply(quantized, row_scale, weight.t(), scale.t(), bias, inputs.dtype, rows=inputs.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, scale = ctx.saved_tensors
        quantized, row_scale = quantize_rows(gradient, scale.view(-1), pad=True)
        result = times_weight(
            quantized,
            row_scale,
            kept,
            is_transposed=ctx.is_transposed,
            dtype=gradient.dtype,
            rows=gradient.shape[0],
        )
        return result, None, None, None, None


def times_weight(
    gradient: torch.Tensor,
    row_scale: torch.Tensor,
    kept: torch.Tensor,
    *,
    is_transposed: bool,
    dtype: torch.dtype,
    rows: int,
) -> torch.Tensor:
    """A quantised gradient (rows, out) with the weight's scales in it times the weight: (rows, in).

    The gradient may have more than `rows`, as `quantize_rows` pads it.
    """
    transposed = kept if is_transposed else transpose_bytes(kept)
    return multiply(gradient, row_scale, transposed.t(), _ones(transposed), None, dtype, rows=rows)


# a product wants scales of both sides, and a gradient's already hold the weight's: ones, on each device
_kept_ones: dict[torch.device, torch.Tensor] = {}
_MOST_ONES = 1 << 16


def keep_ones(device: str) -> None:
    """Make the scales of ones that every product of a gradient needs: else each product launches a kernel."""
    ones = torch.ones((1, _MOST_ONES), device=device, dtype=torch.float32)
    _kept_ones[ones.device] = ones


def _ones(rows: torch.Tensor) -> torch.Tensor:
    """(1, number of rows), fp32."""
    kept = _kept_ones.get(rows.device)
    if kept is None or len(rows) > _MOST_ONES:
        return torch.ones((1, len(rows)), device=rows.device, dtype=torch.float32)
    return kept[:, : len(rows)]


def multiply(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    rows: int,
) -> torch.Tensor:
    """(left * left_scale) @ (right * right_scale) + bias: left (M, K) in rows, right (K, N) in columns.

    `left_scale` (M, 1), `right_scale` (1, N). The result is (rows, N): of M rows, as `quantize_rows` pads
    them, those beyond it are left out, without a copy.
    """
    if left.device.type == "cpu":
        product = (left[:rows].float() * left_scale[:rows]) @ (right.float() * right_scale)
        return (product if bias is None else product + bias.float()).to(dtype)
    padded = torch._scaled_mm(
        left, right, left_scale, right_scale, bias=bias, out_dtype=dtype, use_fast_accum=True
    )
    return padded[:rows]


def transpose_bytes(matrix: torch.Tensor) -> torch.Tensor:
    """(rows, columns) of one-byte values as a contiguous (columns, rows) of the same type."""
    if matrix.device.type == "cpu":
        return matrix.t().contiguous()
    return fp8_rows.transpose_bytes(matrix.view(torch.uint8)).view(matrix.dtype)


def transpose_bytes_into(matrix: torch.Tensor, result: torch.Tensor) -> None:
    """`transpose_bytes` into a tensor (columns, rows) that exists, outside of compiled code."""
    if matrix.device.type == "cpu":
        result.copy_(matrix.t())
    else:
        fp8_rows.transpose_bytes_into(matrix.view(torch.uint8), result.view(torch.uint8))
