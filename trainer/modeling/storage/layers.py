"""Layers of a frozen base with quantised weights: int8 and fp8 with a scale a row, nf4 by bitsandbytes.

Structure comes first: `replacer` says which layer takes the place of a linear that has no values yet. Values
come second, through `Structure.place`, in full precision or as nf4 bytes from a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from trainer.errors import ConfigError
from trainer.modeling.storage.nf4 import Nf4Linear
from trainer.modeling.storage.row_scaled import RowScaledLinear
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
    their inputs, unless the way has a type of its own. `high_precision` are regular expressions over the
    whole names of modules that are kept as they are, `modulation` of those among them that are stored like
    the others where the way packs them, or in its storage for them; modules whose sides the layer does not
    take are kept too.
    """
    if way.trains:
        return None
    keep, beside = any_of(high_precision), any_of(modulation)

    def replace(name: str, linear: torch.nn.Linear) -> StoredLinear | None:
        if way.modulation and beside.fullmatch(name):
            return LAYERS[way.modulation](linear, WAYS[way.modulation])
        kept = keep.fullmatch(name) and not (way.packs and beside.fullmatch(name))
        layer = LAYERS[way.weights]
        return None if kept or not layer.takes(linear, way) else layer(linear, way)

    return replace


def any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    """An expression that matches what any of these does; nothing where there is none."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)")


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
