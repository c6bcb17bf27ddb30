"""Linear layers with their values, stored as those of a frozen base are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from trainer.modeling.storage.layers import Replace
from trainer.modeling.storage.nf4 import Nf4Linear
from trainer.modeling.storage.row_scaled import Kind, RowScaledLinear
from trainer.ways.storages import find


def from_linear(linear: torch.nn.Linear, kind: Kind, *, fp8_compute: bool, copies: int) -> RowScaledLinear:
    """`linear` with its weight quantised on the device that it is on."""
    way = replace(find(kind), compute="fp8" if fp8_compute else "", copies=copies)
    layer = RowScaledLinear(linear, way)
    layer.quantize(linear.weight.data)
    return layer


def nf4_linear(linear: torch.nn.Linear) -> Nf4Linear:
    """`linear` with its weight quantised, scales included, on the device that it is on."""
    layer = Nf4Linear(linear, find("nf4"))
    layer.quantize(linear.weight.data)
    return layer


def replaced(replace: Replace | None, name: str, linear: Any) -> Any:
    """The layer that `replace` puts in a linear's place, filled with its values; None where it keeps it."""
    assert replace is not None
    layer = replace(name, linear)
    if layer is not None:
        layer.quantize(linear.weight.data)
    return layer
