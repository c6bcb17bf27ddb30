"""Training that starts from the adapter of an earlier run's file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.errors import AccessError, ConfigError, DataError, Problem
from trainer.modeling.adapter.adapter_file import NAME_A_RUNS, OTHER_PROGRAM, AdapterFile, read_adapter
from trainer.modeling.adapter.comfyui import alpha_and_rank, by_module
from trainer.modeling.adapter.lora import ADAPTER, adapter_config

WHERE = "lora.init_from"
_MOST_NAMED = 5


def start_from(model: Any, path: Path) -> int:
    """Give the model's fresh adapter the values of a saved one; returns how many tensors they are.

    Raises as `saved_start`.
    """
    from peft import set_peft_model_state_dict

    saved = saved_start(model, path)
    set_peft_model_state_dict(model, saved, adapter_name=ADAPTER)
    return len(saved)


def saved_start(model: Any, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved adapter that the model's fresh one can take, by peft's names.

    Raises ConfigError naming every difference in layers, ranks, alphas or kind, for another kind of file, and
    for values that nothing can be learned from.
    """
    from peft import get_peft_model_state_dict

    adapter = _read(path)
    saved = adapter.state
    fresh = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    problems = [*_differences(saved, fresh), *_alphas(adapter, adapter_config(model), fresh)]
    if problems:
        remedy = "set lora.* as they were in that run, or leave lora.init_from out"
        more = len(problems) - _MOST_NAMED
        told = [*problems[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]
        heading = Problem(what=f"{path} is not this run's adapter", where=WHERE, remedy=remedy)
        raise ConfigError([heading, *(Problem(what=what, where=str(path)) for what in told)])
    _require_trainable(saved, path)
    return saved


def _require_trainable(saved: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise ConfigError for values that are no numbers of a trained adapter, or are all zero: of two factors
    that are zero neither has a gradient.
    """
    faults = [
        f"{name} is of {str(value.dtype).removeprefix('torch.')}, which no adapter is trained in"
        if not value.is_floating_point()
        else f"{name} is not finite"
        for name, value in saved.items()
        if not value.is_floating_point() or not bool(value.float().isfinite().all())
    ]
    if not faults and not any(bool(value.any()) for value in saved.values()):
        faults = ["every tensor is zero, and nothing is learned from there"]
    if faults:
        first, more = faults[0], f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        remedy = "name the file of a step that went well, or leave lora.init_from out"
        raise ConfigError(f"{path}: {first}{more}", where=WHERE, remedy=remedy)


def _read(path: Path) -> AdapterFile:
    try:
        adapter = read_adapter(path)
    except (DataError, AccessError) as error:
        remedy = "name a file that a run saved, whole, or leave lora.init_from out"
        told = [
            dataclasses.replace(one, what=f"{path}: {one.what}", where=WHERE, remedy=one.remedy or remedy)
            for one in error.problems
        ]
        raise ConfigError(told) from error
    if adapter.layout == "comfyui":
        raise ConfigError(f"{path}: {OTHER_PROGRAM}", where=WHERE, remedy=NAME_A_RUNS)
    return adapter


def _differences(saved: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor]) -> list[str]:
    missing = [f"{name} is not in the file" for name in fresh if name not in saved]
    more = [f"{name} is in the file, and not in this run's adapter" for name in saved if name not in fresh]
    shapes = [
        f"{name} is {tuple(saved[name].shape)} in the file and {tuple(value.shape)} in this run"
        for name, value in fresh.items()
        if name in saved and saved[name].shape != value.shape
    ]
    return [*shapes, *missing, *more]


def _alphas(adapter: AdapterFile, own: dict[str, Any], fresh: dict[str, torch.Tensor]) -> list[str]:
    """Alphas that differ; the file's shapes say the ranks."""
    if (adapter.kind == "lokr") != any(".lokr_" in name for name in fresh):
        return []  # the tensors' names say already that it is of another kind
    differing = []
    for module in by_module(fresh):
        (theirs, _), (ours, _) = alpha_and_rank(adapter.config, module), alpha_and_rank(own, module)
        if theirs != ours:
            differing.append(f"{module} has the alpha {theirs:g} in the file and {ours:g} in this run")
    return differing
