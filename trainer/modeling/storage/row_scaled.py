"""A frozen linear layer whose weight has one byte a value and one scale an output row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.utils.flop_counter import register_flop_formula

from trainer.modeling.storage.fp8_product import MULTIPLE, fp8_linear, quantize_rows
from trainer.modeling.storage.stored import StoredLinear
from trainer.ways.storages import Way

if torch.version.cuda is not None:
    from trainer.modeling.triton import fp8_rows

Kind = Literal["int8", "fp8"]
VALUES: dict[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class RowScaledLinear(StoredLinear):
    """A linear layer that computes in FP8, or in the inputs' dtype with an unpacked copy of its weight.

    `weight` holds the values' bytes (out, in) uint8: libraries that look for a model's dtype pass it by.
    `weight_scale` is (out, 1) fp32; `transposed` (in, out) uint8 is a second copy of the values for backward,
    where `Way.copies` asks for one. None has a gradient, and nothing but them is kept for backward.
    """

    kind: Kind
    weight_scale: torch.Tensor
    transposed: torch.Tensor | None

    def __init__(self, linear: torch.nn.Linear, way: Way) -> None:
        super().__init__(linear, way)
        self.fp8_compute = way.compute == "fp8"
        self._twice = self.fp8_compute and way.copies == 2
        self.register_buffer("weight_scale", None)
        self.register_buffer("transposed", None, persistent=False)

    @classmethod
    def takes(cls, linear: torch.nn.Linear, way: Way) -> bool:
        """False where products are in FP8 and its kernels do not take these sides."""
        return not way.compute or takes_fp8(linear)

    def quantize(self, weight: torch.Tensor) -> None:
        """Store a weight (out, in) of full precision on the device that it is on."""
        values, scale = quantize_rows(weight) if self.kind == "fp8" else _int8_rows(weight)
        self.weight = torch.nn.Parameter(values.view(torch.uint8), requires_grad=False)
        self.weight_scale = scale
        if self._twice:
            self.transposed = self.weight.data.t().contiguous()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out) in the input's dtype."""
        return row_scaled(
            input,
            self.weight,
            self.weight_scale,
            self.bias,
            self.transposed,
            kind=self.kind,
            fp8_compute=self.fp8_compute,
        )

    def extra_repr(self) -> str:
        """The sides and the storage, with the type of products where it is FP8."""
        return f"{super().extra_repr()}{' computed in fp8' if self.fp8_compute else ''}"


def row_scaled(
    inputs: torch.Tensor,
    stored: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: torch.Tensor | None,
    *,
    kind: Kind,
    fp8_compute: bool,
) -> torch.Tensor:
    """The product with a stored weight, of one layer or of several whose rows lie one after another."""
    if fp8_compute:
        copy = None if transposed is None else transposed.view(VALUES[kind])
        return fp8_linear(inputs, stored.view(VALUES[kind]), scale, bias, copy)
    output = _product(inputs, stored, scale, kind)
    return output if bias is None else output + bias


def takes_fp8(linear: torch.nn.Linear) -> bool:
    """True if FP8 kernels take a weight of this shape."""
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


# values that are quantised to int8 at a time, which takes fp32 copies of them
_AT_ONCE = 2**24


def _int8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, in) int8 and (out, 1) fp32 by optimum-quanto: symmetric, the largest value of a row is 127.

    The computation is in fp32 for any type of the weight: quanto rounds to the type of its input, and with
    quotients in bf16 the error of a weight is up to 18 % larger.
    """
    from optimum.quanto import AbsmaxOptimizer, qint8, quantize_weight

    values = torch.empty_like(weight, dtype=torch.int8)
    scale = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
    size = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), size):
        part = weight[start : start + size].float()
        own: Any = AbsmaxOptimizer()(part, qint8, axis=0)
        quantized: Any = quantize_weight(part, qint8, axis=0, scale=own, optimized=False)
        values[start : start + size] = quantized._data
        scale[start : start + size] = own.reshape(-1, 1)
    return values, scale


# the product is one operator, its gradient another: a compiler that sees the unpacking does it once, and
# keeps the result of every layer from forward to backward


@torch.library.custom_op("trainer::row_scaled_product", mutates_args=())
def _product(inputs: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.nn.functional.linear(inputs, _unpacked(stored, scale, kind, inputs.dtype))


@torch.library.custom_op("trainer::row_scaled_product_backward", mutates_args=())
def _product_backward(
    gradient: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor, kind: str
) -> torch.Tensor:
    return gradient @ _unpacked(stored, scale, kind, gradient.dtype)


def _unpacked(stored: torch.Tensor, scale: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """The weight (out, in) of its bytes."""
    if kind == "int8" and stored.device.type != "cpu":
        return fp8_rows.unpack_rows(stored.view(torch.int8), scale, dtype)
    values = stored.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    return (values.float() * scale).to(dtype)


@_product.register_fake
def _(inputs: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    return inputs.new_empty((*inputs.shape[:-1], stored.shape[0]))


@_product_backward.register_fake
def _(gradient: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    return gradient.new_empty((*gradient.shape[:-1], stored.shape[1]))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, stored, scale, ctx.kind = inputs
    ctx.save_for_backward(stored, scale)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _product_backward(gradient, *ctx.saved_tensors, ctx.kind), None, None, None


_product.register_autograd(_differentiate, setup_context=_keep_for_backward)


@register_flop_formula([torch.ops.trainer.row_scaled_product, torch.ops.trainer.row_scaled_product_backward])
def _operations(rows: Sequence[int], stored: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of one product: the partitioner recomputes first what costs none."""
    return 2 * math.prod(rows[:-1]) * math.prod(stored)
