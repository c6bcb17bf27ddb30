"""Floor 4: a frozen linear layer whose weight has one byte a value and one scale an output row."""

from __future__ import annotations

from typing import Any, Literal

import torch

from trainer.modeling.fp8 import MULTIPLE, fp8_linear, quantize_rows

Kind = Literal["int8", "fp8"]
VALUES: dict[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class RowScaledLinear(torch.nn.Linear):
    """A linear layer that computes in FP8, or in the inputs' dtype with an unpacked copy of its weight.

    `weight` holds the values' bytes (out, in) uint8: libraries that look for a model's dtype pass it by.
    `weight_scale` is (out, 1) fp32. Neither has a gradient, and nothing but them is kept for backward.
    """

    weight_scale: torch.Tensor
    transposed: torch.Tensor | None

    def __init__(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.nn.Parameter | None,
        *,
        kind: Kind,
        fp8_compute: bool,
        copies: int,
    ) -> None:
        rows, columns = values.shape
        super().__init__(columns, rows, bias=False, device="meta")
        self.kind: Kind = kind
        self.fp8_compute = fp8_compute
        self.weight = torch.nn.Parameter(values.view(torch.uint8), requires_grad=False)
        self.register_buffer("weight_scale", scale)
        self.bias = bias  # type: ignore[assignment]  # torch's class has None for no bias too
        transposed = values.view(torch.uint8).t().contiguous() if fp8_compute and copies == 2 else None
        self.register_buffer("transposed", transposed, persistent=False)

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
        """As torch's, with the kind."""
        return f"{super().extra_repr()}, {self.kind}{' computed in fp8' if self.fp8_compute else ''}"


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
    values = stored.view(VALUES[kind])
    if fp8_compute:
        copy = None if transposed is None else transposed.view(VALUES[kind])
        return fp8_linear(inputs, values, scale, bias, copy)
    output: torch.Tensor = _WeightOnly.apply(inputs, values, scale)
    return output if bias is None else output + bias


def from_linear(linear: torch.nn.Linear, kind: Kind, *, fp8_compute: bool, copies: int) -> RowScaledLinear:
    """`linear` with its weight quantised on the device that it is on."""
    values, scale = quantize_rows(linear.weight.data) if kind == "fp8" else _int8_rows(linear)
    return RowScaledLinear(values, scale, linear.bias, kind=kind, fp8_compute=fp8_compute, copies=copies)


def takes_fp8(linear: torch.nn.Linear) -> bool:
    """Whether FP8 kernels take a weight of this shape."""
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


def _int8_rows(linear: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """By optimum-quanto: symmetric, the largest value of a row is 127."""
    from optimum.quanto import qint8
    from optimum.quanto.nn import QLinear

    quantized: Any = QLinear.from_module(linear, weights=qint8)
    quantized.freeze()
    return quantized.weight._data, quantized.weight._scale.float().reshape(-1, 1)


class _WeightOnly(torch.autograd.Function):
    """inputs @ weight.T with the weight unpacked for the product and again for backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values, scale)
        return torch.nn.functional.linear(inputs, _unpacked(values, scale, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        values, scale = ctx.saved_tensors
        return gradient @ _unpacked(values, scale, gradient.dtype), None, None


def _unpacked(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (values.float() * scale).to(dtype)
