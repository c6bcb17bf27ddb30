"""Floor 4: quantised linear layers of a frozen base: int8 and fp8 with a scale a row, nf4 by bitsandbytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer.errors import AccessError, ConfigError
from trainer.modeling.rowscaled import Kind, RowScaledLinear, from_linear, takes_fp8

QUANTIZED = ("int8", "fp8", "nf4")
"""Storages that are made while a base loads."""

Replace = Callable[[str, torch.nn.Module], torch.nn.Module | None]
"""Given a loaded linear's name and module, its replacement or None; called as soon as its tensors are
there.
"""


def replacer(
    weights: str,
    high_precision: Sequence[str],
    dtype: torch.dtype,
    *,
    fp8_compute: bool = False,
    copies: int = 1,
) -> Replace | None:
    """The `Replace` for `load_streamed` that stores linears as the plan's `weights`; None for bf16 and fp32.

    int8 and fp8 have one scale a row, nf4 one a 64 values, quantised once more. All compute in `dtype`, but
    fp8 with `fp8_compute` in FP8, with so many `copies` of the weight. `high_precision` are regular
    expressions over the whole names of modules that are kept as they are, as are those whose sides FP8
    kernels do not take.
    """
    if weights not in QUANTIZED:
        return None
    keep = re.compile("|".join(f"(?:{pattern})" for pattern in high_precision) or "(?!)")

    def replace(name: str, module: torch.nn.Module) -> torch.nn.Module | None:
        assert isinstance(module, torch.nn.Linear), name
        if keep.fullmatch(name) or (fp8_compute and not takes_fp8(module)):
            return None
        if weights == "nf4":
            return _nf4(module, dtype)
        kind: Kind = "fp8" if weights == "fp8" else "int8"
        return from_linear(module, kind, fp8_compute=fp8_compute, copies=copies)

    return replace


def packed_linear(
    name: str,
    linear: torch.nn.Linear,
    tensors: Mapping[str, torch.Tensor],
    device: str,
    dtype: torch.dtype,
    *,
    where: str,
) -> torch.nn.Module:
    """`linear` with a weight that a checkpoint holds in nf4; its bias is kept, on whatever device it is.

    `tensors` are those of the file, named `<name>.weight` and `<name>.weight.absmax` and so on. Raises
    AccessError at `where` for a packed weight that is not of the layer's shape.
    """
    from bitsandbytes.nn.modules import Params4bit

    key = f"{name}.weight"
    statistics = {other: tensor for other, tensor in tensors.items() if other != key}
    layer = _empty_linear4bit(linear, dtype)
    layer.weight = Params4bit.from_prequantized(tensors[key], statistics, device=device, module=layer)
    state = layer.weight.quant_state
    wanted = (linear.out_features, linear.in_features)
    if tuple(state.shape) != wanted:
        raise AccessError(
            f"tensor {key} is packed from {tuple(state.shape)}, the model's is {wanted}",
            where=where,
            remedy="is this the right model for the configured family?",
        )
    # what it was packed from may be another type; unpacked for backward it must be that of forward
    state.dtype = dtype
    return layer


def count_quantized(model: torch.nn.Module, weights: str) -> tuple[int, int]:
    """(linears in `weights`, linears in full precision).

    Raises ConfigError where none is quantised: a plan that says so and such a model contradict each other.
    """
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    count = sum(_is_quantized(linear, weights) for linear in linears)
    if count == 0:
        raise ConfigError(f"the plan asks for a base in {weights}, but no layer of this model was quantised")
    return count, len(linears) - count


def _is_quantized(linear: torch.nn.Linear, weights: str) -> bool:
    if weights != "nf4":
        return isinstance(linear, RowScaledLinear) and linear.kind == weights
    from bitsandbytes.nn.modules import Linear4bit

    return isinstance(linear, Linear4bit)


def _nf4(linear: Any, dtype: torch.dtype) -> torch.nn.Module:
    from bitsandbytes.nn.modules import Params4bit

    layer = _empty_linear4bit(linear, dtype)
    weight: Any = Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer
    )
    # bitsandbytes quantises where a tensor is first moved to, be it the device that it is on
    layer.weight = weight.to(linear.weight.device)
    return layer


def _empty_linear4bit(linear: torch.nn.Linear, dtype: torch.dtype) -> Any:
    """A layer of the same shape with the same bias, and a weight that is still to come."""
    from bitsandbytes.nn.modules import Linear4bit

    layer = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=dtype,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    layer.bias = linear.bias
    # on CPUs with AVX-512 BF16 the first call without gradients would repack the weight into a layout that
    # has no backward, so that training could not go on after a preview
    layer.support_avx512bf16_for_cpu = False
    return layer
