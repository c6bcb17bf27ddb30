"""A gradient as FP8 in the two layouts that its products want (`fp8_trained`): by rows for the gradient of
inputs, by columns for that of a weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trainer.modeling.storage.fp8_product import LEAST, MOST, padded_rows, quantize_rows

if torch.version.cuda is not None:
    from trainer.modeling.triton import fp8_gradient


class QuantizedGradient(NamedTuple):
    """Bytes of a gradient (rows, out); on a GPU `padded_rows` of them, zeros beyond its own."""

    values: torch.Tensor
    """(padded, out) e4m3: gradient * column_scale = values * scale."""
    scale: torch.Tensor
    """(padded, 1) fp32."""
    turned: torch.Tensor
    """(out, padded) e4m3: (gradient * row_scale) transposed = turned * turned_scale."""
    turned_scale: torch.Tensor
    """(out, 1) fp32."""
    sums: torch.Tensor
    """(out,) fp32, over all rows of the gradient itself."""


def quantize_gradient(
    gradient: torch.Tensor, column_scale: torch.Tensor | None, row_scale: torch.Tensor, *, with_sums: bool
) -> QuantizedGradient:
    """Gradient (rows, out), by rows, by columns, and summed.

    `values` and `scale` are empty where `column_scale` is None, and `sums` unless asked for. `column_scale`
    (out,) and `row_scale` (rows or more, 1) are fp32 and positive. What is not finite makes its row NaN, and
    its column. On a GPU `out` is a multiple of 16, and sums are made in one order: equal in each run.
    """
    rows = gradient.shape[0]
    if gradient.device.type != "cpu":
        found = fp8_gradient.quantize_gradient(
            gradient.contiguous(), column_scale, row_scale, MOST, LEAST, padded_rows(rows), with_sums
        )
        return QuantizedGradient(*found)
    values, scale = quantize_rows(gradient[:0] if column_scale is None else gradient, column_scale)
    turned, turned_scale = quantize_rows((gradient.float() * row_scale[:rows]).t().contiguous())
    sums = gradient.sum(0, dtype=torch.float32) if with_sums else gradient.new_empty(0, dtype=torch.float32)
    return QuantizedGradient(values, scale, turned, turned_scale, sums)
