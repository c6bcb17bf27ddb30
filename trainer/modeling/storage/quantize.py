"""Quantised linear layers of a frozen base: int8 and fp8 with a scale a row, nf4 by bitsandbytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch

from trainer.errors import AccessError, ConfigError
from trainer.modeling.storage.nf4 import Nf4Linear, nf4_linear
from trainer.modeling.storage.row_quantized import from_linear, takes_fp8
from trainer.modeling.storage.stored import StoredLinear
from trainer.ways.storages import WAYS, Way

LAYERS: dict[str, Callable[[torch.nn.Linear, Way], torch.nn.Module]] = {
    "int8": lambda linear, way: from_linear(linear, "int8", fp8_compute=False, copies=1),
    "nf4": lambda linear, way: nf4_linear(linear),
    "fp8": lambda linear, way: from_linear(
        linear, "fp8", fp8_compute=way.compute == "fp8", copies=way.copies
    ),
}
"""`Way.weights` of each frozen storage -> the layer that a loaded linear becomes."""
Replace = Callable[[str, torch.nn.Module], torch.nn.Module | None]
"""Given a loaded linear's name and module, its replacement or None; called as soon as its tensors are
there.
"""


def replacer(way: Way, high_precision: Sequence[str], modulation: Sequence[str] = ()) -> Replace | None:
    """The `Replace` for `load_streamed` that stores linears in the plan's way; None for one that trains.

    int8 and fp8 have one scale a row, nf4 one a 64 values, quantised once more. All compute in the type of
    their inputs, but fp8 where the way says so. `high_precision` are regular expressions over the whole names
    of modules that are kept as they are, `modulation` of those among them that are stored like the others
    where the way packs them, or in its storage for them; modules whose sides FP8 kernels do not take are kept
    too.
    """
    if way.trains:
        return None
    keep, beside = _any_of(high_precision), _any_of(modulation)

    def replace(name: str, module: torch.nn.Module) -> torch.nn.Module | None:
        assert isinstance(module, torch.nn.Linear), name
        if way.modulation and beside.fullmatch(name):
            return LAYERS[way.modulation](module, WAYS[way.modulation])
        kept = keep.fullmatch(name) and not (way.packs and beside.fullmatch(name))
        if kept or (way.compute == "fp8" and not takes_fp8(module)):
            return None
        return LAYERS[way.weights](module, way)

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
    """(linears in `weights` or in the storage of modulation beside it, linears in full precision).

    Raises ConfigError where none is in `weights`: a plan that says so and such a model contradict each other.
    """
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    stored = [linear.kind if isinstance(linear, StoredLinear) else "" for linear in linears]
    if weights not in stored:
        raise ConfigError(f"the plan asks for a base in {weights}, but no layer of this model was quantised")
    kept = stored.count("")
    return len(stored) - kept, kept
