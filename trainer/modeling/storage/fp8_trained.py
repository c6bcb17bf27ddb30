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

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from trainer.modeling.storage.fp8_gradient import quantize_gradient
from trainer.modeling.storage.fp8_product import (
    multiply,
    quantize_rows,
    quantize_rows_into,
    times_weight,
    transpose_bytes_into,
    unpack_rows,
)
from trainer.modeling.storage.layers import any_of
from trainer.modeling.storage.row_scaled import takes_fp8

WeightGradient = Literal["fp8", "bf16"]
"""Type that the gradient of a weight is multiplied in."""


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
        self.copies, self.weight_gradient = copies, weight_gradient
        for name in ("values", "scale", "transposed"):
            self.register_buffer(name, None, persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the weight as it is now: a pass over it, and one over its bytes for the transposed copy.

        They are written in place: graphs know where they lie.
        """
        self._quantize(self.weight)

    def _quantize(self, weight: torch.Tensor) -> None:
        (out, inner), device = weight.shape, weight.device
        if self.values is None or self.scale is None:
            self.values = torch.empty((out, inner), dtype=torch.float8_e4m3fn, device=device)
            self.scale = torch.empty((out, 1), dtype=torch.float32, device=device)
            if self.copies == 2:
                self.transposed = torch.empty((inner, out), dtype=torch.float8_e4m3fn, device=device)
        quantize_rows_into(weight, self.values, self.scale)
        if self.transposed is not None:
            transpose_bytes_into(self.values, self.transposed)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out) in the input's dtype."""
        if not self.training:
            return super().forward(input)
        return fp8_trained_linear(input, self.weight, self.quantized, self.bias, self.weight_gradient)

    @property
    def quantized(self) -> Quantized:
        """The bytes of the last `refresh`."""
        assert self.values is not None and self.scale is not None, "refresh comes before the first step"
        return Quantized(self.values, self.scale, self.transposed)

    def extra_repr(self) -> str:
        """The sides of torch's own layer, and what it multiplies in."""
        return f"{super().extra_repr()}, trained in fp8, gradient of the weight in {self.weight_gradient}"


def multiply_in_fp8(
    model: torch.nn.Module,
    high_precision: Sequence[str],
    make: Callable[[torch.nn.Linear], Fp8TrainedLinear],
) -> tuple[int, int]:
    """Have the linears of a model that trains in bf16 multiply in FP8; gives the numbers of those and of
    linears that are kept as they are.

    `make` gives the layer in a linear's place, which has its parameters. Kept are those whose whole names one
    of `high_precision` (regular expressions) matches, those in another type and those whose sides the kernels
    do not take.
    """
    keep, found = any_of(high_precision), [0, 0]
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear):
            continue
        kept = keep.fullmatch(name) or module.weight.dtype != torch.bfloat16 or not takes_fp8(module)
        found[bool(kept)] += 1
        if not kept:
            model.set_submodule(name, make(module).train(module.training))
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
    biases = () if bias is None else (bias,)
    return fp8_joined_linear(inputs, (weight,), quantized, biases, None, weight_gradient)


def fp8_joined_linear(
    inputs: torch.Tensor,
    weights: Sequence[torch.Tensor],
    quantized: Quantized,
    biases: Sequence[torch.Tensor],
    joint_bias: torch.Tensor | None,
    weight_gradient: WeightGradient,
) -> torch.Tensor:
    """`fp8_trained_linear` of several layers as one: their outputs beside each other.

    `quantized` and `joint_bias` are those of all weights (out, in) and biases (out,) under each other;
    weights, and biases where there are any, have gradients that are views of one.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    bias = joint_bias if len(biases) > 1 else None
    output: torch.Tensor = _Trained.apply(
        rows, *quantized, bias, weight_gradient, len(weights), *weights, *biases
    )
    return output.reshape(*inputs.shape[:-1], output.shape[-1])


class _Trained(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        values: torch.Tensor,
        scale: torch.Tensor,
        transposed: torch.Tensor | None,
        joint_bias: torch.Tensor | None,
        weight_gradient: WeightGradient,
        layers: int,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        weights, biases = parameters[:layers], parameters[layers:]
        kept, row_scale = quantize_rows(inputs, pad=True)
        ctx.save_for_backward(kept, row_scale, values if transposed is None else transposed, scale)
        ctx.is_transposed, ctx.weight_gradient = transposed is not None, weight_gradient
        ctx.sizes = [len(one) for one in weights]
        ctx.types = weights[0].dtype, biases[0].dtype if biases else None
        bias = biases[0] if len(biases) == 1 else joint_bias
        return multiply(kept, row_scale, values.t(), scale.t(), bias, inputs.dtype, rows=inputs.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, row_scale, weight, scale = ctx.saved_tensors
        of_inputs = of_weight = of_bias = both = None
        rows, (dtype, bias_dtype) = gradient.shape[0], ctx.types
        wants = ctx.needs_input_grad
        wants_inputs, first_bias = wants[0], _FIRST + len(ctx.sizes)
        wants_weight, wants_bias = any(wants[_FIRST:first_bias]), any(wants[first_bias:])
        if wants_weight and ctx.weight_gradient == "fp8":
            across = scale.view(-1) if wants_inputs else None
            both = quantize_gradient(gradient, across, row_scale, with_sums=wants_bias)
            # rows that were added to the inputs are zeros, and in the gradient too
            of_weight = times_weight(
                both.turned, both.turned_scale, kept, is_transposed=False, dtype=dtype, rows=gradient.shape[1]
            )
        elif wants_weight:
            inputs = unpack_rows(kept[:rows], row_scale[:rows], gradient.dtype)
            of_weight = (gradient.t() @ inputs).to(dtype)
        if wants_inputs:
            quantized, own = quantize_rows(gradient, scale.view(-1), pad=True) if both is None else both[:2]
            of_inputs = times_weight(
                quantized, own, weight, is_transposed=ctx.is_transposed, dtype=gradient.dtype, rows=rows
            )
        if wants_bias:
            sums = gradient.sum(0, dtype=torch.float32) if both is None else both.sums
            of_bias = sums.to(bias_dtype)
        nothing = [None] * (_FIRST - 1)
        of_biases = () if bias_dtype is None else by_member(of_bias, ctx.sizes)
        return of_inputs, *nothing, *by_member(of_weight, ctx.sizes), *of_biases


# place of the first weight among what `_Trained` is given
_FIRST = 7


def by_member(whole: torch.Tensor | None, sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
    """A gradient of joint parameters as views of each one's rows."""
    return [None] * len(sizes) if whole is None else whole.split(list(sizes))
