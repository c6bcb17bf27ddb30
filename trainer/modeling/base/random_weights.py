"""Components with seeded random weights, for training from nothing and for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.modeling.base.structure import Structure, built, cast, tied
from trainer.modeling.seeds import seeded


def random_module(
    component_class: Any, folder: Path, label: str, *, device: str, dtype: torch.dtype, fill_zeros: bool
) -> torch.nn.Module:
    """The component with its library's own initialisation, built on the device, seeded by `label`.

    With `fill_zeros` the matrices that it starts with at zero get values.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with seeded(label, device), torch.device(device):
            module = built(component_class, folder)
    finally:
        torch.set_default_dtype(default)
    cast(module, dtype)
    if fill_zeros:
        with seeded(f"{label}/zeros", device), torch.no_grad():
            for linear in module.modules():
                if type(linear) is torch.nn.Linear and not bool(linear.weight.any()):
                    linear.weight.normal_(std=0.02)
    return module.to(device)


def draw(structure: Structure, elsewhere: Mapping[str, str]) -> None:
    """Fill a structure layer by layer: its linears are quantised before the next one is drawn.

    Peaks stay near the final size. Values are not those of `random_module`: a library's initialisation wants
    the whole model. Matrices are drawn as torch draws linear layers, scales are 1, biases 0.
    """
    with seeded(structure.random_label, structure.device):
        for owner, module in structure.module.named_modules():
            for leaf, _ in list(module.named_parameters(recurse=False)):
                name = f"{owner}.{leaf}".removeprefix(".")
                if name in tied(structure.module):
                    continue
                wanted = structure.wanted[name]
                drawn = torch.empty_like(wanted, device=structure.device)
                if wanted.ndim < 2:
                    drawn.fill_(1.0 if leaf == "weight" else 0.0)
                else:
                    bound = wanted.shape[1:].numel() ** -0.5
                    drawn.uniform_(-bound, bound)
                structure.place(name, drawn, elsewhere)
                del drawn
