"""Floor 4: training that starts from the adapter of an earlier run's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainer.errors import ConfigError, Problem
from trainer.modeling.comfyui import alpha_of
from trainer.modeling.lora import ADAPTER, adapter_config, adapter_state

WHERE = "lora.init_from"
_PREFIXES = ("transformer.", "base_model.model.")
"""What diffusers and peft put before a layer's name."""
_BESIDE, _INSIDE = "adapter_config.json", "lora_adapter_metadata"
_MOST_NAMED = 5


def start_from(model: Any, path: Path) -> int:
    """Give the model's fresh adapter the values of a saved one; returns how many tensors they are.

    Raises ConfigError naming every difference in layers, ranks, alphas or kind, and for another kind of file.
    """
    from peft import set_peft_model_state_dict

    saved, config = _read(path)
    fresh = adapter_state(model)
    problems = [*_differences(saved, fresh), *_alphas(config, adapter_config(model), fresh)]
    if problems:
        remedy = "set lora.* as they were in that run, or leave lora.init_from out"
        more = len(problems) - _MOST_NAMED
        told = [*problems[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]
        heading = Problem(what=f"{path} is not this run's adapter", where=WHERE, remedy=remedy)
        raise ConfigError([heading, *(Problem(what=what, where=str(path)) for what in told)])
    set_peft_model_state_dict(model, saved, adapter_name=ADAPTER)
    return len(saved)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """Tensors by peft's names, and peft's configuration where the file or its folder has it."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        remedy = "name a .safetensors file of an earlier run"
        raise ConfigError(f"{path} cannot be read ({error})", where=WHERE, remedy=remedy) from error
    if any(name.endswith((".alpha", ".dora_scale")) for name in tensors):
        remedy = "name the file beside it without `.comfyui` in its name"
        raise ConfigError(f"{path} is laid out for ComfyUI", where=WHERE, remedy=remedy)
    named = {_own_name(name): tensor for name, tensor in tensors.items()}
    if _INSIDE in metadata:
        rows = json.loads(metadata[_INSIDE])
        return named, {_own_name(key): value for key, value in rows.items()}
    beside = path.parent / _BESIDE
    return named, json.loads(beside.read_text()) if beside.is_file() else None


def _own_name(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _differences(saved: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor]) -> list[str]:
    missing = [f"{name} is not in the file" for name in fresh if name not in saved]
    more = [f"{name} is in the file, and not in this run's adapter" for name in saved if name not in fresh]
    shapes = [
        f"{name} is {tuple(saved[name].shape)} in the file and {tuple(value.shape)} in this run"
        for name, value in fresh.items()
        if name in saved and saved[name].shape != value.shape
    ]
    return [*shapes, *missing, *more]


def _alphas(config: dict[str, Any] | None, own: dict[str, Any], fresh: dict[str, torch.Tensor]) -> list[str]:
    """Alphas that differ; the file's shapes say the ranks."""
    if config is None:
        return ["it says nothing of its alpha: it is of another program"]
    kind = ".lokr_" if any(".lokr_" in name for name in fresh) else ".lora_"
    if ("lora_alpha" in config) != (kind == ".lora_"):
        return []  # of another kind, which the tensors' names say already
    modules = dict.fromkeys(name.partition(kind)[0] for name in fresh)
    pairs = [(module, alpha_of(config, module), alpha_of(own, module)) for module in modules]
    return [
        f"{module} has the alpha {theirs:g} in the file and {ours:g} in this run"
        for module, theirs, ours in pairs
        if theirs != ours
    ]
