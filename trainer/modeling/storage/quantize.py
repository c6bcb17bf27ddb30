"""Layers of a frozen base with quantised weights: int8 and fp8 with a scale a row, nf4 by bitsandbytes.

Structure comes first: `replacer` says which layer takes the place of a linear that has no values yet. Values
come second, through `fill`, in full precision or as nf4 bytes from a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from trainer.errors import AccessError, ConfigError
from trainer.modeling.storage.nf4 import Nf4Linear
from trainer.modeling.storage.row_quantized import RowScaledLinear, takes_fp8
from trainer.modeling.storage.stored import StoredLinear
from trainer.ways.storages import WAYS, Way

LAYERS: dict[str, type[StoredLinear]] = {
    "int8": RowScaledLinear,
    "nf4": Nf4Linear,
    "fp8": RowScaledLinear,
}
"""`Way.weights` of each frozen storage -> the layer that takes the place of a linear."""
Replace = Callable[[str, torch.nn.Linear], StoredLinear | None]
"""A function of a linear's name and the linear: the layer in its place, both without values, or None."""


def replacer(way: Way, high_precision: Sequence[str], modulation: Sequence[str] = ()) -> Replace | None:
    """The `Replace` that stores linears in the plan's way; None for a way that trains.

    int8 and fp8 have one scale a row, nf4 one a 64 values, quantised once more. All compute in the type of
    their inputs, but fp8 where the way says so. `high_precision` are regular expressions over the whole names
    of modules that are kept as they are, `modulation` of those among them that are stored like the others
    where the way packs them, or in its storage for them; modules whose sides FP8 kernels do not take are kept
    too.
    """
    if way.trains:
        return None
    keep, beside = _any_of(high_precision), _any_of(modulation)

    def replace(name: str, linear: torch.nn.Linear) -> StoredLinear | None:
        if way.modulation and beside.fullmatch(name):
            return LAYERS[way.modulation](linear, WAYS[way.modulation])
        kept = keep.fullmatch(name) and not (way.packs and beside.fullmatch(name))
        if kept or (way.compute == "fp8" and not takes_fp8(linear)):
            return None
        return LAYERS[way.weights](linear, way)

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

    The `weight` of a stored layer comes in full precision and is quantised here, or it is nf4 bytes with
    `beside` them whatever else bitsandbytes writes for a weight. Raises AccessError, whose place is `where`,
    for rows of another shape than the module's.
    """
    leaf, said, shape, state = name.rpartition(".")[2], "is", tuple(rows.shape), None
    if beside:
        from bitsandbytes.functional import QuantState

        state = QuantState.from_dict(dict(beside), device=rows.device)
        said, shape = "is packed from", tuple(state.shape)
    layer = module if leaf == "weight" and isinstance(module, StoredLinear) else None
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
    """(linears in `weights` or in the storage of modulation beside it, linears in full precision).

    Raises ConfigError where no layer is in `weights`, which contradicts the plan.
    """
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    stored = [linear.kind if isinstance(linear, StoredLinear) else "" for linear in linears]
    if weights not in stored:
        raise ConfigError(f"the plan asks for a base in {weights}, but no layer of this model was quantised")
    kept = stored.count("")
    return len(stored) - kept, kept
