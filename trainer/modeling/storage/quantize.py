"""Layers of a frozen base with quantised weights: int8 and fp8 with a scale a row, nf4 by bitsandbytes.

Structure comes first: `replacer` says which layer takes the place of a linear that has no values yet. Values
come second, through `fill`, whatever they are: full precision, or nf4 bytes from a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import torch

from trainer.errors import AccessError, ConfigError
from trainer.modeling.storage.nf4 import Nf4Linear
from trainer.modeling.storage.row_quantized import Kind, RowScaledLinear, takes_fp8
from trainer.ways.storages import PACK_MODULATION

QUANTIZED = ("int8", "fp8", "nf4")
"""Storages that are made while a base loads."""

Replace = Callable[[str, torch.nn.Linear], torch.nn.Module | None]
"""Given a linear's name and the linear, without values: the layer without values in its place, or None."""


def replacer(
    weights: str,
    high_precision: Sequence[str],
    modulation: Sequence[str] = (),
    *,
    fp8_compute: bool = False,
    copies: int = 1,
    modulation_as: Literal["", "int8"] = "",
) -> Replace | None:
    """The `Replace` that stores linears as the plan's `weights`; None for bf16 and fp32.

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

    def replace(name: str, linear: torch.nn.Linear) -> torch.nn.Module | None:
        if modulation_as and beside.fullmatch(name):
            return RowScaledLinear(linear, modulation_as, fp8_compute=False, copies=1)
        kept = keep.fullmatch(name) and not take.fullmatch(name)
        if kept or (fp8_compute and not takes_fp8(linear)):
            return None
        if weights == "nf4":
            return Nf4Linear(linear)
        kind: Kind = "fp8" if weights == "fp8" else "int8"
        return RowScaledLinear(linear, kind, fp8_compute=fp8_compute, copies=copies)

    return replace


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)")


def fill(
    name: str,
    module: torch.nn.Module,
    rows: torch.Tensor,
    *,
    beside: Mapping[str, torch.Tensor] = MappingProxyType({}),
    where: str = "",
) -> None:
    """Give `module` the rows of its tensor of that whole name, on their device and in their type.

    The `weight` of a quantised layer comes in full precision and is quantised here, or it is nf4 bytes with
    `beside` them whatever else bitsandbytes writes for a weight. Raises AccessError, whose place is `where`,
    for rows of another shape than the module's.
    """
    leaf, said, shape, state = name.rpartition(".")[2], "is", tuple(rows.shape), None
    if beside:
        from bitsandbytes.functional import QuantState

        state = QuantState.from_dict(dict(beside), device=rows.device)
        said, shape = "is packed from", tuple(state.shape)
    layer = module if leaf == "weight" and isinstance(module, RowScaledLinear | Nf4Linear) else None
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    wanted = tuple(own[leaf].shape) if layer is None else (layer.out_features, layer.in_features)
    if shape != wanted:
        raise AccessError(
            f"tensor {name} {said} {shape}, the model's is {wanted}",
            where=where,
            remedy="is this the right model for the configured family?",
        )
    if state is not None:
        assert isinstance(layer, Nf4Linear), name
        layer.take(rows, state)
    elif layer is not None:
        layer.quantize(rows)
    elif leaf in module._buffers:
        module._buffers[leaf] = rows
    else:
        module.register_parameter(leaf, torch.nn.Parameter(rows, requires_grad=False))


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
