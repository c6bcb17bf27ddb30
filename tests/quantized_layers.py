"""Linear layers with their values, stored as those of a frozen base are."""

from __future__ import annotations

from typing import Any

import torch

from trainer.modeling.storage.nf4 import Nf4Linear
from trainer.modeling.storage.quantize import Replace, fill
from trainer.modeling.storage.row_quantized import Kind, RowScaledLinear


def from_linear(linear: torch.nn.Linear, kind: Kind, *, fp8_compute: bool, copies: int) -> RowScaledLinear:
    """`linear` with its weight quantised on the device that it is on."""
    layer = RowScaledLinear(linear, kind, fp8_compute=fp8_compute, copies=copies)
    fill("weight", layer, linear.weight.data)
    return layer


def nf4_linear(linear: torch.nn.Linear) -> Nf4Linear:
    """`linear` with its weight quantised, scales included, on the device that it is on."""
    layer = Nf4Linear(linear)
    fill("weight", layer, linear.weight.data)
    return layer


def replaced(replace: Replace | None, name: str, linear: Any) -> Any:
    """What `replace` puts in the place of a linear, with the linear's values; None where it keeps it."""
    assert replace is not None
    layer = replace(name, linear)
    if layer is not None:
        fill("weight", layer, linear.weight.data)
    return layer
