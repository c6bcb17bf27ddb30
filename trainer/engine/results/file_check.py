"""A LoRA file alone, judged without a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trainer.errors import DataError, Problem
from trainer.files.safetensors import UNREADABLE
from trainer.modeling.adapter.adapter_file import require_known_names
from trainer.modeling.adapter.peft_config import (
    CONFIG_INSIDE,
    PEFT_PREFIX,
    config_beside,
    config_inside,
    require_rank_and_alpha,
)

_FACTORS = {".lora_B": ".lora_A", ".lokr_w1": ".lokr_w2"}
"""Parts of an adapter that training starts at zero, and the other factor of each. Either may be a product of
two tensors, whose names go on with `_a` and `_b`."""


def grows(name: str) -> list[str]:
    """The part of an adapter that a tensor is, if training starts it at zero; else none."""
    return [part for part in _FACTORS if part in name]


def check_file(path: Path) -> int:
    """Number of adapted layers; needs no model. Raises DataError naming every tensor that is not finite, has
    no partner or does not fit it, for a file whose adapter is zero, for another trainer's names, and for a
    damaged configuration in it or beside it, AccessError where one beside it is missing.
    """
    try:
        with safe_open(path, framework="pt") as file:
            inside = (file.metadata() or {}).get(CONFIG_INSIDE)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        what = f"cannot be read as safetensors ({error})"
        raise DataError(what, where=str(path), remedy=UNREADABLE) from error
    require_known_names(tensors, path)
    ups = {name: part for name in tensors for part in grows(name)}
    faults = [f"{name} is not finite" for name, one in tensors.items() if not one.float().isfinite().all()]
    if not ups:
        faults.append("holds no lora_B tensor: this is not a LoRA, or it was saved empty")
    faults += _unpaired(tensors)
    if ups and not any(bool(tensors[name].any()) for name in ups):
        faults.append(f"every {next(iter(ups.values()))[1:]} is zero: the adapter changes nothing")
    if faults:
        remedies = ["name the file of another step, or of a run that went well", *[""] * len(faults)]
        rows = zip(faults, remedies, strict=False)
        raise DataError([Problem(what=fault, where=str(path), remedy=remedy) for fault, remedy in rows])
    if inside is not None:
        require_rank_and_alpha(config_inside(inside, path), path)
    if any(name.startswith(PEFT_PREFIX) for name in tensors):
        config_beside(path)
    return len(ups)


def _unpaired(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Factors that are alone, and factors (out, rank) and (rank, in) of a LoRA whose ranks differ."""
    for up, down in _FACTORS.items():
        layers = {part: {name.partition(part)[0] for name in tensors if part in name} for part in (up, down)}
        for name in tensors:
            for part, other in ((up, down), (down, up)):
                if part in name and name.partition(part)[0] not in layers[other]:
                    yield f"{name} has no partner {other[1:]}"
    for part, name in itertools.product((".lokr_w1", ".lokr_w2"), tensors):
        for one, other in ((f"{part}_a", f"{part}_b"), (f"{part}_b", f"{part}_a")):
            if one in name and name.replace(one, other) not in tensors:
                yield f"{name} has no partner {other[1:]}"
    for name, grown in tensors.items():
        partner = tensors.get(name.replace(".lora_B", ".lora_A"), grown)
        # convolutions in groups have other shapes
        pair = ".lora_B" in name and partner is not grown and grown.ndim == partner.ndim == 2
        if pair and grown.shape[1] != partner.shape[0]:
            shapes = f"{tuple(grown.shape)} and {tuple(partner.shape)}"
            yield f"{name} does not fit its partner lora_A: {shapes} are not of one rank"
