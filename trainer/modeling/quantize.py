"""Floor 4: quantised linear layers of a frozen base: int8 by optimum-quanto, nf4 by bitsandbytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer.errors import AccessError, ConfigError

Replace = Callable[[str, torch.nn.Module], torch.nn.Module | None]
"""Given a loaded linear's name and module, its replacement or None; called as soon as its tensors are
there.
"""


def replacer(weights: str, high_precision: Sequence[str], dtype: torch.dtype) -> Replace | None:
    """The `Replace` for `load_streamed` that stores linears as the plan's `weights`; None for bf16 and fp32.

    int8 has one scale a row, nf4 one a 64 values, quantised once more; both compute in `dtype`.
    `high_precision` are regular expressions over the whole names of modules that are kept as they are.
    """
    if weights not in _QUANTIZERS:
        return None
    keep = re.compile("|".join(f"(?:{pattern})" for pattern in high_precision))
    quantize = _QUANTIZERS[weights]

    def replace(name: str, module: torch.nn.Module) -> torch.nn.Module | None:
        return None if keep.fullmatch(name) else quantize(module, dtype)

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


def require_quantized(model: torch.nn.Module, weights: str) -> int:
    """Number of linears in `weights`, int8 or nf4; a plan that says so and a model of none contradict."""
    count = sum(isinstance(module, _linear_class(weights)) for module in model.modules())
    if count == 0:
        raise ConfigError(f"the plan asks for a base in {weights}, but no layer of this model was quantised")
    return count


def _linear_class(weights: str) -> Any:
    if weights == "int8":
        from optimum.quanto.nn import QLinear

        return QLinear
    from bitsandbytes.nn.modules import Linear4bit

    return Linear4bit


def _int8(linear: Any, dtype: torch.dtype) -> torch.nn.Module:
    from optimum.quanto import qint8
    from optimum.quanto.nn import QLinear

    quantized = QLinear.from_module(linear, weights=qint8)
    quantized.freeze()
    return quantized


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


_QUANTIZERS: dict[str, Callable[[Any, torch.dtype], torch.nn.Module]] = {"int8": _int8, "nf4": _nf4}
