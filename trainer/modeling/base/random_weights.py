"""Components with seeded random weights, for training from nothing and for benchmarks."""

from __future__ import annotations

from typing import Any

import torch

from trainer.modeling.base.empty import (
    Waiting,
    built,
    built_empty,
    cast,
    linears,
    modules_inside,
    on_meta,
    stored_type,
    swap,
    tie,
    tied,
    to_device,
    to_host,
)
from trainer.modeling.base.source import ModelSource
from trainer.modeling.seeds import seeded
from trainer.modeling.storage.quantize import Replace


def random_module(
    component_class: Any,
    source: ModelSource,
    name: str,
    *,
    device: str,
    dtype: torch.dtype,
    fill_zeros: bool = False,
) -> torch.nn.Module:
    """The component with its library's own initialisation, built on the device, seeded by run seed and
    name; `fill_zeros` as in `load_streamed`.
    """
    import transformers

    folder = source.component(name)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with seeded(f"{source.seed}/{name}", device), torch.device(device):
            module = built(component_class, folder)
    finally:
        torch.set_default_dtype(default)
    if isinstance(module, transformers.PreTrainedModel):
        # its rope tables stay in fp32
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
    else:
        cast(module, dtype)
    if fill_zeros:
        _fill_zeros(module, f"{source.seed}/{name}/zeros", device)
    return module.to(device)


def random_replaced(
    component_class: Any,
    source: ModelSource,
    name: str,
    *,
    device: str,
    dtype: torch.dtype,
    replace: Replace,
    waiting: Waiting | None = None,
) -> torch.nn.Module:
    """The component drawn layer by layer on the device, each linear replaced before the next is drawn.

    Peaks stay near the final size. Values are not those of `random_module`: a library's initialisation wants
    the whole model. Matrices are drawn as torch draws linear layers, scales are 1, biases 0. `waiting` as in
    `load_streamed`.
    """
    module = built_empty(component_class, source.component(name), dtype)
    empty, shared = set(on_meta(module)), tied(module)
    for target in _tied_targets(module):
        empty.discard(target)
    owners, on_host = [owner for owner, _ in module.named_modules()], modules_inside(module, waiting)
    with seeded(f"{source.seed}/{name}", device), torch.no_grad():
        for owner in owners:
            _draw(module, owner, empty, device=device, dtype=dtype)
            child = module.get_submodule(owner)
            if type(child) is torch.nn.Linear and owner not in shared:
                swap(module, owner, replace(owner, child))
            del child
            if owner in on_host:
                to_host(module, owner)
    tie(module)
    return to_device(module, device, on_host)


def _tied_targets(module: torch.nn.Module) -> list[str]:
    """Tensors that get another's values."""
    import transformers

    return [*module.all_tied_weights_keys] if isinstance(module, transformers.PreTrainedModel) else []


def _draw(module: torch.nn.Module, owner: str, empty: set[str], *, device: str, dtype: torch.dtype) -> None:
    """Values for those parameters of one submodule, without its children, that are in `empty`."""
    child = module.get_submodule(owner)
    for name, parameter in list(child.named_parameters(recurse=False)):
        whole = f"{owner}.{name}".removeprefix(".")
        if whole not in empty:
            continue
        kind = stored_type(module, whole, dtype)
        drawn = torch.empty(parameter.shape, dtype=kind, device=device)
        if parameter.ndim < 2:
            drawn.fill_(1.0 if name == "weight" else 0.0)
        else:
            bound = parameter.shape[1:].numel() ** -0.5
            drawn.uniform_(-bound, bound)
        child.register_parameter(name, torch.nn.Parameter(drawn, requires_grad=False))


def _fill_zeros(module: torch.nn.Module, label: str, device: str) -> None:
    """Draw every linear layer's all-zero weight from a normal distribution of 0.02."""
    with seeded(label, device), torch.no_grad():
        for _, linear in linears(module):
            if not bool(linear.weight.any()):
                linear.weight.normal_(std=0.02)
