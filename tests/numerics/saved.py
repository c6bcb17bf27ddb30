"""Bytes that autograd keeps for backward, counted by hooks: the reference for planned activations."""

from __future__ import annotations

from collections.abc import Callable

import torch


def kept_bytes(model: torch.nn.Module, forward: Callable[[], object]) -> int:
    """Bytes of all tensors that `forward` saves for backward, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
