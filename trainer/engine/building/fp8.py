"""FP8 in a built model: layers whose weights are trained in it, and the proof that products ran in it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.engine.building.fast import join_linears, small_batch, small_forward
from trainer.engine.building.model import Model
from trainer.engine.context import Context
from trainer.errors import ConfigError, HardwareError
from trainer.modeling.storage.fp8_product import keep_ones
from trainer.modeling.storage.fp8_trained import (
    Fp8TrainedLinear,
    WeightGradient,
    multiply_in_fp8,
    refresh_weights,
)
from trainer.modeling.storage.joined_trained import products_of
from trainer.words.plurals import numbered


def prove_fp8(context: Context, model: Any) -> str:
    """Keep the tensors that FP8 products share; say how many products of a small forward pass ran in FP8.

    Raises HardwareError where a layer's product ran in another type: the plan would say FP8 and the run not.
    """
    from trainer.modeling.storage.row_scaled import RowScaledLinear

    keep_ones(context.device)
    run = small_forward(context, model)
    with _Products() as products:
        run()
    layers = sum(isinstance(module, RowScaledLinear) and module.fp8_compute for module in model.modules())
    if products.count < layers:
        wanted = numbered(layers, "layer is", "layers are")
        raise HardwareError(
            f"{wanted} to multiply in FP8, but only {products.count} FP8 products ran",
            where="features.compute",
            remedy="set features.compute: bf16",
        )
    return f"{products.count} products of one forward pass ran in FP8, as counted"


def train_in_fp8(context: Context, model: Model, names: list[list[str]]) -> str:
    """Have a model's linears multiply in FP8 while their weights train, those of one input (`names`) as one;
    say how many, and how many products of a small forward and backward pass ran in FP8.

    Raises ConfigError where no layer can, and HardwareError where a product ran in another type.
    """
    kind = weight_gradient(context)
    if model.root is None:
        make = functools.partial(Fp8TrainedLinear, copies=context.plan.way.copies, weight_gradient=kind)
        multiply_in_fp8(model.module, context.family.high_precision, make)
    linears = [one for one in model.module.modules() if isinstance(one, torch.nn.Linear)]
    count = sum(isinstance(one, Fp8TrainedLinear) for one in linears)
    if not count:
        raise ConfigError(
            "no layer of this model can be trained in FP8",
            where="features.compute",
            remedy="set features.compute: bf16",
        )
    joined = join_linears(context, model, names)
    keep_ones(context.device)
    refresh_weights(model.module)
    proved = prove_trained(context, model.module)
    return f"fp8: {count} of {len(linears)} linear layers, gradients of weights in {kind}; {joined}; {proved}"


def rows_in_fp8(context: Context, module: Any) -> None:
    """Have a model's linears multiply in FP8 whose weights will lie in rows: before these are parted."""
    from trainer.modeling.storage.trained_rows import Fp8RowsLinear

    make = functools.partial(Fp8RowsLinear, weight_gradient=weight_gradient(context))
    multiply_in_fp8(module, context.family.high_precision, make)


def weight_gradient(context: Context) -> WeightGradient:
    """Type that the plan multiplies the gradients of weights in."""
    return "fp8" if context.plan.weight_gradient == "fp8" else "bf16"


def prove_trained(context: Context, model: Any) -> str:
    """Say how many products of a small forward and backward pass ran in FP8.

    Raises HardwareError where a layer, or a group of joined ones, had fewer than its share: output, gradient
    of the inputs and, unless that is in bf16, gradient of the weights.
    """
    batch, draw = small_batch(context)
    with _Products() as products:
        context.family.loss(model, batch, draw, context.settings).sum().backward()
    groups = list(products_of(model))
    # nothing reads what a last block makes of the text: there a model has no gradient
    reached = sum(any(layer.weight.grad is not None for layer in group) for group in groups)
    for parameter in model.parameters():
        parameter.grad = None
    each = 3 if context.plan.weight_gradient == "fp8" else 2
    wanted = len(groups) + (each - 1) * reached
    if not reached or products.count < wanted:
        raise HardwareError(
            f"{sum(map(len, groups))} layers are to have {wanted} products in FP8, but only"
            f" {products.count} ran in it",
            where="features.compute",
            remedy="set features.compute: bf16",
        )
    return f"{products.count} products of one micro-batch ran in FP8, as counted"


class _Products(TorchDispatchMode):
    """Counts FP8 products as torch dispatches them; a profiler would print lines of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._scaled_mm.default
        return func(*args, **(kwargs or {}))
