"""An adapter's file with ComfyUI's keys, scaled as ComfyUI computes it.

Source: ComfyUI's comfy/weight_adapter. lora.py and lokr.py scale by alpha / rank where the file has an alpha
and the factor has a rank, else by one. base.py, weight_decompose, divides a DoRA's rows by the norm of the
base's, where peft and the paper divide by that of the changed ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.errors import DataError
from trainer.modeling.adapter.lora import effective_change
from trainer.modeling.adapter.targets import pattern_value
from trainer.modeling.tensor_file import write_tensors

_MAGNITUDE, _SCALE = "magnitude_vector", "dora_scale"
Parts = Mapping[str, torch.Tensor]
"""Tensors of one layer, by what follows its name: `lora_A.weight`, `lokr_w1`, ..."""


def write_comfyui(
    state: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, str],
    *,
    config: Mapping[str, Any],
    key_of: Callable[[str], str | None],
    weight_of: Callable[[str], torch.Tensor],
    swapped: Collection[str] = (),
) -> None:
    """Write `state`, peft's tensors by name; `config` is peft's, `key_of` as `Family.comfyui_keys`.

    `weight_of` gives a layer's frozen weight, which only a DoRA needs; `swapped` as `Family.comfyui_swaps`.
    Raises DataError for a layer that ComfyUI does not know.
    """
    tensors: dict[str, torch.Tensor] = {}
    for module, parts in by_module(state).items():
        prefix = key_of(module)
        if prefix is None:
            raise DataError(f"ComfyUI does not know the layer {module}", where="lora.target_modules")
        alpha, rank = alpha_of(config, module), rank_of(config, module)
        if any(part.startswith("lokr_") for part in parts):
            # without an alpha ComfyUI scales by one, as it does a factor without a rank: one factor is scaled
            left = parts["lokr_w1"]
            found = {**parts, "lokr_w1": (left.float() * (alpha / rank)).to(left.dtype)}
        else:
            found = _lora(parts, alpha, rank, functools.partial(weight_of, module))
        if module in swapped and _SCALE in found:
            # it swaps the rows of the low-rank change as those of the weight, and leaves these as they are
            found[_SCALE] = torch.cat(found[_SCALE].chunk(2)[::-1])
        tensors |= {f"{prefix}.{part}": tensor.contiguous() for part, tensor in found.items()}
    write_tensors(path, tensors, {"format": "pt", **metadata}, None)


def unnamed(state: Mapping[str, torch.Tensor], key_of: Callable[[str], str | None]) -> list[str]:
    """Layers of `state` that `write_comfyui` would refuse."""
    return [module for module in by_module(state) if key_of(module) is None]


def alpha_of(config: Mapping[str, Any], module: str) -> float:
    """A layer's alpha, as peft reads its configuration."""
    default = config["lora_alpha"] if "lora_alpha" in config else config["alpha"]
    return float(pattern_value(config["alpha_pattern"], module, default))


def rank_of(config: Mapping[str, Any], module: str) -> int:
    """A layer's rank, as peft reads its configuration."""
    return int(pattern_value(config["rank_pattern"], module, config["r"]))


def by_module(state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by layer, and by what follows its name: `lora_A.weight`, `lokr_w1`, ..."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        kind = ".lokr_" if ".lokr_" in name else ".lora_"
        module, _, part = name.partition(kind)
        found.setdefault(module, {})[f"{kind[1:]}{part}"] = tensor
    return found


def _lora(
    parts: Parts, alpha: float, rank: int, weight: Callable[[], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """ComfyUI's tensors of a LoRA or DoRA layer; `weight` gives the frozen weight of a DoRA's layer."""
    down, up = parts["lora_A.weight"], parts["lora_B.weight"]
    written = {"lora_A.weight": down, "lora_B.weight": up, "alpha": torch.tensor(alpha, dtype=torch.float32)}
    magnitude = parts.get(f"lora_{_MAGNITUDE}")
    if magnitude is not None:
        base = weight().detach().float().cpu()
        changed = base + effective_change(down, up, alpha / rank)
        share = base.norm(dim=1) / changed.norm(dim=1)
        written[_SCALE] = (magnitude.float() * share)[:, None]
    return written
