"""Weights in nf4 as bitsandbytes writes them into files."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.functional import QuantState, get_4bit_type

from trainer.modeling.storage.nf4 import Nf4Linear


def quant_state(layer: Nf4Linear, dtype: torch.dtype) -> QuantState:
    """bitsandbytes' own description of a layer's weight, which was packed from `dtype`."""
    outer = QuantState(
        absmax=layer.nested_absmax,
        code=layer.nested_code,
        blocksize=layer.nested_blocksize,
        dtype=torch.float32,
    )
    return QuantState(
        absmax=layer.absmax,
        shape=torch.Size((layer.out_features, layer.in_features)),
        code=get_4bit_type("nf4", device=layer.weight.device.type),
        blocksize=layer.blocksize,
        quant_type="nf4",
        dtype=dtype,
        offset=layer.offset,
        state2=outer,
    )


def stored_state(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A model's tensors by the names that its files have."""
    packed = {name: module for name, module in model.named_modules() if isinstance(module, Nf4Linear)}
    beside = {f"{name}.{buffer}".lstrip(".") for name, layer in packed.items() for buffer in layer._buffers}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in beside}
    for name, layer in packed.items():
        prefix = f"{name}.weight".lstrip(".")
        written = quant_state(layer, dtype).as_dict(packed=True)
        state |= {f"{prefix}.{key}": tensor for key, tensor in written.items()}
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}
