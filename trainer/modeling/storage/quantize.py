"""Quantised linear layers of a frozen base: int8 and fp8 with a scale a row, nf4 by bitsandbytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from trainer.errors import AccessError, ConfigError
from trainer.modeling.storage.nf4 import Nf4Linear, nf4_linear
from trainer.modeling.storage.row_quantized import Kind, RowScaledLinear, from_linear, takes_fp8
from trainer.ways.storages import PACK_MODULATION

QUANTIZED = ("int8", "fp8", "nf4")
"""Storages that are made while a base loads."""

Replace = Callable[[str, torch.nn.Module], torch.nn.Module | None]
"""Given a loaded linear's name and module, its replacement or None; called as soon as its tensors are
there.
"""


def replacer(
    weights: str,
    high_precision: Sequence[str],
    modulation: Sequence[str] = (),
    *,
    fp8_compute: bool = False,
    copies: int = 1,
    modulation_as: Literal["", "int8"] = "",
) -> Replace | None:
    """The `Replace` for `load_streamed` that stores linears as the plan's `weights`; None for bf16 and fp32.

    int8 and fp8 have one scale a row, nf4 one a 64 values, quantised once more. All compute in the type of
    their inputs, but fp8 with `fp8_compute` in FP8, with so many `copies` of the weight. `high_precision` are
    regular expressions over the whole names of modules that are kept as they are, `modulation` of those
    among them that int8 and nf4 quantise all the same, and any storage does as `modulation_as` where that is
    given; modules whose sides FP8 kernels do not take are kept too.
    """
    if weights not in QUANTIZED:
        return None
    keep = _any_of(high_precision)
    take, beside = _any_of(modulation if weights in PACK_MODULATION else ()), _any_of(modulation)

    def replace(name: str, module: torch.nn.Module) -> torch.nn.Module | None:
        assert isinstance(module, torch.nn.Linear), name
        if modulation_as and beside.fullmatch(name):
            return from_linear(module, modulation_as, fp8_compute=False, copies=1)
        kept = keep.fullmatch(name) and not take.fullmatch(name)
        if kept or (fp8_compute and not takes_fp8(module)):
            return None
        if weights == "nf4":
            return nf4_linear(module)
        kind: Kind = "fp8" if weights == "fp8" else "int8"
        return from_linear(module, kind, fp8_compute=fp8_compute, copies=copies)

    return replace


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)")


def packed_linear(
    name: str,
    linear: torch.nn.Linear,
    tensors: Mapping[str, torch.Tensor],
    device: str,
    *,
    where: str,
) -> torch.nn.Module:
    """`linear` with a weight that a checkpoint holds in nf4; its bias is kept, on whatever device it is.

    `tensors` are those of the file, named `<name>.weight` and `<name>.weight.absmax` and so on. Raises
    AccessError at `where` for a packed weight that is not of the layer's shape.
    """
    from bitsandbytes.functional import QuantState

    key = f"{name}.weight"
    statistics = {other: tensor for other, tensor in tensors.items() if other != key}
    state = QuantState.from_dict(statistics, device=torch.device(device))
    wanted = (linear.out_features, linear.in_features)
    if tuple(state.shape) != wanted:
        raise AccessError(
            f"tensor {key} is packed from {tuple(state.shape)}, the model's is {wanted}",
            where=where,
            remedy="is this the right model for the configured family?",
        )
    return Nf4Linear(tensors[key].to(device), state, linear.bias)


def count_quantized(model: torch.nn.Module, weights: str) -> tuple[int, int]:
    """(linears in `weights` or beside it in int8, linears in full precision).

    Raises ConfigError where none is in `weights`: a plan that says so and such a model contradict each other.
    """
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    stored = [_storage(linear) for linear in linears]
    if weights not in stored:
        raise ConfigError(f"the plan asks for a base in {weights}, but no layer of this model was quantised")
    beside = stored.count("int8") if weights == "fp8" else 0
    count = stored.count(weights) + beside
    return count, len(linears) - count


def _storage(linear: torch.nn.Linear) -> str:
    if isinstance(linear, Nf4Linear):
        return "nf4"
    return linear.kind if isinstance(linear, RowScaledLinear) else ""
