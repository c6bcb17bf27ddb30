"""An adapter's file with ComfyUI's keys, scaled as ComfyUI computes it.

Source: ComfyUI's comfy/weight_adapter. lora.py and lokr.py scale by alpha / rank where the file has an alpha
and the factor has a rank, else by one. base.py, weight_decompose, divides a DoRA's rows by the norm of the
base's, where peft and the paper divide by that of the changed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.errors import DataError
from trainer.modeling.adapter.lora import effective_change, lokr_factor
from trainer.modeling.adapter.targets import pattern_value
from trainer.modeling.tensor_file import require_written, write_tensors

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
    The file is read back: it has every bit that was written. Raises StorageError, and DataError where it has
    not, and for a layer that ComfyUI does not know.
    """
    tensors: dict[str, torch.Tensor] = {}
    for module, parts in by_module(state).items():
        prefix = key_of(module)
        if prefix is None:
            raise DataError(f"ComfyUI does not know the layer {module}", where="lora.target_modules")
        alpha, rank = alpha_and_rank(config, module)
        if any(part.startswith("lokr_") for part in parts):
            # without an alpha ComfyUI scales by one, as it does a factor without a rank: one factor is
            # scaled, in fp32, in which ComfyUI multiplies: scaled values may lie between those of bf16
            found = {part: tensor for part, tensor in parts.items() if not part.startswith("lokr_w1")}
            found["lokr_w1"] = lokr_factor(parts, "lokr_w1") * (alpha / rank)
        else:
            down, up = parts["lora_A.weight"], parts["lora_B.weight"]
            found = {"lora_A.weight": down, "lora_B.weight": up}
            found["alpha"] = torch.tensor(alpha, dtype=torch.float32)
            if "lora_magnitude_vector" in parts:
                base = weight_of(module).detach().float().cpu()
                share = base.norm(dim=1) / (base + effective_change(down, up, alpha / rank)).norm(dim=1)
                del base  # a whole weight in fp32
                scale = (parts["lora_magnitude_vector"].float() * share)[:, None]
                # it swaps the rows of the low-rank change as those of the weight, and leaves these alone
                found["dora_scale"] = torch.cat(scale.chunk(2)[::-1]) if module in swapped else scale
        tensors |= {f"{prefix}.{part}": tensor.contiguous() for part, tensor in found.items()}
    require_written(path, write_tensors(path, tensors, {"format": "pt", **metadata}, None))


def alpha_and_rank(config: Mapping[str, Any], module: str) -> tuple[float, int]:
    """A layer's alpha and its rank, as peft reads its configuration."""
    default = config["lora_alpha"] if "lora_alpha" in config else config["alpha"]
    alpha = pattern_value(config["alpha_pattern"], module, default)
    return float(alpha), int(pattern_value(config["rank_pattern"], module, config["r"]))


def by_module(state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by layer, and by what follows its name: `lora_A.weight`, `lokr_w1`, ..."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        kind = ".lokr_" if ".lokr_" in name else ".lora_"
        module, _, part = name.partition(kind)
        found.setdefault(module, {})[f"{kind[1:]}{part}"] = tensor
    return found
