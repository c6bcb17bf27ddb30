"""Linear layers whose frozen weight is stored in 4 bits (nf4), packed and unpacked by bitsandbytes.

bitsandbytes' own layer keeps the scales of a weight in an object beside the tensor, which no compiler traces.
Here the same tensors are buffers of the layer. A product is one operator, and its gradient another: each
unpacks the weight inside, the largest weights in parts, so that a compiler cannot keep the unpacked weight
from forward to backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from trainer.modeling.storage.stored import StoredLinear
from trainer.ways.storages import NF4_MOST_UNPACKED, Way

_TILE = 128
"""A part of a weight has a multiple of so many rows. Eight would do for 16-byte words, but products compute
tiles of 64 to 320 rows, and a part that ends within a tile computes the rest of it in vain.
"""


class Nf4Linear(StoredLinear):
    """A linear layer that computes in the inputs' dtype with an unpacked copy of its weight.

    `weight` holds nf4 bytes, two values each, (out * in / 2, 1) uint8; `absmax` a scale for every `blocksize`
    values, in fp32, or as bytes that are quantised with the buffers `nested_*` and `offset`. Nothing else is
    kept for backward, and nothing but the inputs has a gradient.
    """

    absmax: torch.Tensor
    nested_absmax: torch.Tensor | None
    nested_code: torch.Tensor | None
    offset: torch.Tensor | None
    blocksize: int
    nested_blocksize: int

    def __init__(self, linear: torch.nn.Linear, way: Way) -> None:
        super().__init__(linear, way)
        for name in ("absmax", "nested_absmax", "nested_code", "offset"):
            self.register_buffer(name, None)

    def quantize(self, weight: torch.Tensor) -> None:
        """Store a weight (out, in) of full precision, scales included, on the device that it is on."""
        from bitsandbytes.functional import quantize_4bit

        self.take(*quantize_4bit(weight, compress_statistics=True, quant_type="nf4"))

    def take(self, stored: torch.Tensor, state: Any) -> None:
        """Keep nf4 bytes, whose statistics are in a QuantState of bitsandbytes."""
        nested = state.state2 if state.nested else None
        self.weight = torch.nn.Parameter(stored, requires_grad=False)
        self.blocksize, self.absmax = state.blocksize, state.absmax
        self.nested_blocksize = 0 if nested is None else nested.blocksize
        self.nested_absmax = None if nested is None else nested.absmax
        self.nested_code = None if nested is None else nested.code
        self.offset = None if nested is None else state.offset

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out) in the input's dtype."""
        rows = input.reshape(-1, input.shape[-1])
        output = _product(
            rows,
            self.bias,
            self.weight,
            self.absmax,
            self.nested_absmax,
            self.nested_code,
            self.offset,
            [self.out_features, self.in_features],
            self.blocksize,
            self.nested_blocksize,
        )
        return output.reshape(*input.shape[:-1], self.out_features)


@torch.library.custom_op("trainer::nf4_product", mutates_args=())
def _product(
    inputs: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    offset: torch.Tensor | None,
    shape: Sequence[int],
    blocksize: int,
    nested_blocksize: int,
) -> torch.Tensor:
    scales = _scales(absmax, nested_absmax, nested_code, offset, nested_blocksize)
    parts = _parts(shape, blocksize)
    if len(parts) == 1:
        return torch.nn.functional.linear(
            inputs, _unpacked(weight, scales, shape[1], blocksize, parts[0], inputs.dtype), bias
        )
    output = inputs.new_empty((inputs.shape[0], shape[0]))
    for rows in parts:
        part = _unpacked(weight, scales, shape[1], blocksize, rows, inputs.dtype).t()
        if bias is None:
            torch.mm(inputs, part, out=output[:, rows])
        else:
            torch.addmm(bias[rows], inputs, part, out=output[:, rows])
    return output


@torch.library.custom_op("trainer::nf4_product_backward", mutates_args=())
def _product_backward(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    offset: torch.Tensor | None,
    shape: Sequence[int],
    blocksize: int,
    nested_blocksize: int,
) -> torch.Tensor:
    scales = _scales(absmax, nested_absmax, nested_code, offset, nested_blocksize)
    parts = _parts(shape, blocksize)
    if len(parts) == 1:
        return gradient @ _unpacked(weight, scales, shape[1], blocksize, parts[0], gradient.dtype)
    found = gradient.new_zeros((gradient.shape[0], shape[1]), dtype=torch.float32)
    for rows in parts:
        part = _unpacked(weight, scales, shape[1], blocksize, rows, gradient.dtype)
        _add_product(found, gradient[:, rows], part)
        del part  # before the next one, and before the sum is copied
    return found.to(gradient.dtype)


def _add_product(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to `found`, fp32, whatever type the factors have: a sum in bf16 rounds every time."""
    if found.device.type == "cpu" or left.dtype == found.dtype:
        found.addmm_(left.to(found.dtype), right.to(found.dtype))
    else:
        torch.addmm(found, left, right, out_dtype=torch.float32, out=found)


def _parts(shape: Sequence[int], blocksize: int) -> list[slice]:
    """Rows of the weight that are unpacked at a time: all rows, except of the largest weights.

    Parts are whole tiles of rows: where one begins between two 16-byte words, cuBLAS falls back to kernels of
    older GPUs, which take more than twice as long. A part has a tile at least: no model's rows are so long
    that it is more than the most.
    """
    rows, columns = shape
    if rows * columns <= NF4_MOST_UNPACKED or columns % blocksize:
        return [slice(0, rows)]
    most = max(NF4_MOST_UNPACKED // columns // _TILE, 1)
    tiles = -(-rows // _TILE)
    size = -(-tiles // -(-tiles // most)) * _TILE
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _scales(
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    offset: torch.Tensor | None,
    nested_blocksize: int,
) -> torch.Tensor:
    """The scale of every block, fp32."""
    if nested_absmax is None or offset is None:
        return absmax
    import bitsandbytes  # noqa: F401  # registers its operators

    found: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
        absmax, nested_absmax, nested_code, nested_blocksize, torch.float32
    )
    return found.add_(offset)


def _unpacked(
    weight: torch.Tensor, scales: torch.Tensor, columns: int, blocksize: int, rows: slice, dtype: torch.dtype
) -> torch.Tensor:
    """These rows of the weight, (rows, in)."""
    import bitsandbytes  # noqa: F401  # registers its operators

    start, end = rows.start * columns, rows.stop * columns
    whole: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        weight[start // 2 : -(-end // 2)],
        scales[start // blocksize : -(-end // blocksize)],
        blocksize,
        "nf4",
        [rows.stop - rows.start, columns],
        dtype,
    )
    return whole


@_product.register_fake
def _(inputs: torch.Tensor, *stored: Any) -> torch.Tensor:
    return inputs.new_empty((inputs.shape[0], stored[6][0]))


@_product_backward.register_fake
def _(gradient: torch.Tensor, *stored: Any) -> torch.Tensor:
    return gradient.new_empty((gradient.shape[0], stored[5][1]))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, *tensors, ctx.shape, ctx.blocksize, ctx.nested_blocksize = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    found = _product_backward(gradient, *ctx.saved_tensors, ctx.shape, ctx.blocksize, ctx.nested_blocksize)
    return found, *(None,) * 9


_product.register_autograd(_differentiate, setup_context=_keep_for_backward)


@register_flop_formula([torch.ops.trainer.nf4_product, torch.ops.trainer.nf4_product_backward])
def _operations(rows: Sequence[int], *stored: Any, **_: Any) -> int:
    """Operations of one product: the partitioner recomputes first what costs none."""
    out, into = next(one for one in stored if isinstance(one, list) and len(one) == 2)
    return 2 * rows[0] * int(out) * int(into)
