"""A trained linear layer that multiplies in FP8 (e4m3): forward, and for the gradients of inputs and weight.

The weight stays in the run's type, as it is saved. Its bytes are made once a step, with one scale an output
row (`refresh`); inputs and gradients are quantised as they come, with one scale a token, and backward keeps
the inputs' bytes. Tensor cores read both operands along the summed axis, so a scale that lies along it is
multiplied into the gradient before that is quantised:

    output    =  inputs[t, i] * s[t]    x  weight[o, i] * w[o]             sum over i
    d inputs  =  (gradient * w)[t, o]   x  weight[o, i]                    sum over o
    d weight  =  (gradient * s)[t, o]   x  inputs[t, i]                    sum over t

so the gradient is quantised twice, by rows and by columns, and inputs and weight once. While a model draws or
is judged (`eval`) the weight itself is multiplied: that is what its user will run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from trainer.modeling.storage.fp8 import multiply, quantize_rows, times_weight, transpose_bytes
from trainer.modeling.storage.quantize import any_of
from trainer.modeling.storage.row_quantized import takes_fp8
from trainer.ways.storages import Way

WeightGradient = Literal["fp8", "bf16"]
"""Type that the gradient of a weight is multiplied in."""


_COLUMNS = 2048
"""Columns of a gradient that are quantised at a time: they exist in fp32 meanwhile, three times."""


class Quantized(NamedTuple):
    """A weight's bytes."""

    values: torch.Tensor
    """(out, in) e4m3."""
    scale: torch.Tensor
    """(out, 1) fp32."""
    transposed: torch.Tensor | None
    """(in, out) e4m3, for the gradient of the inputs; None: it is made for each product."""


class Fp8TrainedLinear(torch.nn.Linear):
    """A linear layer with the parameters of another, computed in FP8 while it trains.

    `refresh` follows each change of the weight, and comes before the first step.
    """

    values: torch.Tensor | None
    scale: torch.Tensor | None
    transposed: torch.Tensor | None

    def __init__(
        self, linear: torch.nn.Linear, *, copies: int = 2, weight_gradient: WeightGradient = "fp8"
    ) -> None:
        if not takes_fp8(linear):
            sides = f"{linear.in_features} x {linear.out_features}"
            raise ValueError(f"FP8 products want sides that are multiples of 16, not {sides}")
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._twice, self._weight_gradient = copies == 2, weight_gradient
        for name in ("values", "scale", "transposed"):
            self.register_buffer(name, None, persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the weight as it is now."""
        values, scale = quantize_rows(self.weight)
        transposed = transpose_bytes(values) if self._twice else None
        if self.values is None or self.scale is None:
            self.values, self.scale, self.transposed = values, scale, transposed
            return
        # in place: graphs know where they lie
        self.values.copy_(values)
        self.scale.copy_(scale)
        if self.transposed is not None and transposed is not None:
            self.transposed.copy_(transposed)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out) in the input's dtype."""
        if not self.training:
            return super().forward(input)
        assert self.values is not None and self.scale is not None, "refresh comes before the first step"
        quantized = Quantized(self.values, self.scale, self.transposed)
        return fp8_trained_linear(input, self.weight, quantized, self.bias, self._weight_gradient)

    def extra_repr(self) -> str:
        """The sides of torch's own layer, and what it multiplies in."""
        return f"{super().extra_repr()}, trained in fp8, gradient of the weight in {self._weight_gradient}"


def multiply_in_fp8(
    model: torch.nn.Module, way: Way, high_precision: Sequence[str], weight_gradient: WeightGradient
) -> tuple[int, int]:
    """Have the linears of a model that trains in bf16 multiply in FP8; gives the numbers of those and of
    linears that are kept as they are.

    Kept are those whose whole names one of `high_precision` (regular expressions) matches, those in another
    type and those whose sides the kernels do not take. Parameters stay the same objects under the same names.
    """
    keep, found = any_of(high_precision), [0, 0]
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear):
            continue
        kept = keep.fullmatch(name) or module.weight.dtype != torch.bfloat16 or not takes_fp8(module)
        found[bool(kept)] += 1
        if not kept:
            layer = Fp8TrainedLinear(module, copies=way.copies, weight_gradient=weight_gradient)
            model.set_submodule(name, layer.train(module.training))
    return found[0], found[1]


def refresh_weights(model: torch.nn.Module) -> int:
    """Quantise every `Fp8TrainedLinear`'s weight as it is now; gives their number."""
    layers = [one for one in model.modules() if isinstance(one, Fp8TrainedLinear)]
    for layer in layers:
        layer.refresh()
    return len(layers)


def fp8_trained_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    quantized: Quantized,
    bias: torch.Tensor | None,
    weight_gradient: WeightGradient = "fp8",
) -> torch.Tensor:
    """inputs (..., in) @ weight (out, in).T + bias (out,), in the inputs' dtype, by FP8 tensor cores.

    `quantized` is what is multiplied; inputs, weight and bias have gradients, each in its own type. On a CPU
    the products are computed in fp32 from the same quantised values.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    output: torch.Tensor = _Trained.apply(rows, weight, *quantized, bias, weight_gradient)
    return output.reshape(*inputs.shape[:-1], weight.shape[0])


class _Trained(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        values: torch.Tensor,
        scale: torch.Tensor,
        transposed: torch.Tensor | None,
        bias: torch.Tensor | None,
        weight_gradient: WeightGradient,
    ) -> torch.Tensor:
        kept, row_scale = quantize_rows(inputs, pad=True)
        ctx.save_for_backward(kept, row_scale, values if transposed is None else transposed, scale)
        ctx.is_transposed, ctx.weight_gradient = transposed is not None, weight_gradient
        ctx.types = weight.dtype, None if bias is None else bias.dtype
        return multiply(kept, row_scale, values.t(), scale.t(), bias, inputs.dtype, rows=inputs.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, row_scale, weight, scale = ctx.saved_tensors
        of_inputs = of_weight = of_bias = None
        rows, (dtype, bias_dtype) = gradient.shape[0], ctx.types
        if ctx.needs_input_grad[0]:
            quantized, own = quantize_rows(gradient, scale.view(-1), pad=True)
            of_inputs = times_weight(
                quantized, own, weight, is_transposed=ctx.is_transposed, dtype=gradient.dtype, rows=rows
            )
        if ctx.needs_input_grad[1]:
            of_weight = _gradient_of_weight(gradient, kept, row_scale, dtype, ctx.weight_gradient)
        if bias_dtype is not None and ctx.needs_input_grad[5]:
            of_bias = gradient.sum(0, dtype=torch.float32).to(bias_dtype)
        return of_inputs, of_weight, None, None, None, of_bias, None


def _gradient_of_weight(
    gradient: torch.Tensor,
    kept: torch.Tensor,
    row_scale: torch.Tensor,
    dtype: torch.dtype,
    weight_gradient: WeightGradient,
) -> torch.Tensor:
    """Gradient (rows, out), and the inputs' bytes (rows or more, in) with their scales: (out, in)."""
    rows = gradient.shape[0]
    if weight_gradient == "bf16":
        inputs = (kept[:rows].float() * row_scale[:rows]).to(gradient.dtype)
        return (gradient.t() @ inputs).to(dtype)
    columns = torch.empty((gradient.shape[1], len(kept)), dtype=kept.dtype, device=gradient.device)
    own = torch.empty((len(columns), 1), dtype=torch.float32, device=gradient.device)
    for first in range(0, len(columns), _COLUMNS):
        part = slice(first, first + _COLUMNS)
        # rows that were added to the inputs are zeros, and here too
        scaled = torch.zeros((len(own[part]), len(kept)), dtype=torch.float32, device=gradient.device)
        scaled[:, :rows] = (gradient[:, part].float() * row_scale[:rows]).t()
        columns[part], own[part] = quantize_rows(scaled)
    return times_weight(columns, own, kept, is_transposed=False, dtype=dtype, rows=len(columns))
