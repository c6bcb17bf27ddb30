"""Trained linear layers that are given one row a sample, as modulation is, in compiled blocks.

The gradient of such a weight sums one outer product a sample. As a matrix product its summed axis has a
length of one or two, which tensor cores cannot fill: on an H200 cuBLAS took 70 us in the mean for weights of
3072 x 18432 and half of that, three times as long as writing them takes. As products of values, which the
compiler turns into one kernel, it takes little more than the writing.
"""

from __future__ import annotations

import re
from typing import Any

import torch

# samples up to which values are multiplied one by one: then tensor cores have something to do
_MOST_SAMPLES = 8


class SampleLinear(torch.nn.Linear):
    """A linear layer whose inputs have one row a sample. It is assigned as the class of a layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(samples, in) -> (samples, out); inputs of other shapes, and more samples, as in torch's layer."""
        if input.dim() != 2 or input.shape[0] > _MOST_SAMPLES:
            return super().forward(input)
        output: torch.Tensor = _FewRows.apply(input, self.weight, self.bias)
        return output


def multiply_few_rows(model: torch.nn.Module, names: re.Pattern[str]) -> int:
    """Have a model's plain linear layers whose whole names `names` matches compute as `SampleLinear` does;
    gives their number. Parameters stay the same objects.
    """
    count = 0
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and names.fullmatch(name):
            module.__class__ = SampleLinear
            count += 1
    return count


class _FewRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return torch.nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad
        of_inputs = gradient @ weight if wants_inputs else None
        of_weight = of_bias = None
        if wants_weight:
            products = gradient.float()[:, :, None] * inputs.float()[:, None, :]
            of_weight = products.sum(0).to(weight.dtype)
        if wants_bias:
            of_bias = gradient.sum(0, dtype=torch.float32).to(gradient.dtype)
        return of_inputs, of_weight, of_bias
