"""Floor 4: LoRA through the model's own `add_adapter`, and the files it is saved as."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.errors import ConfigError, DataError, Problem
from trainer.modeling.seeds import seeded
from trainer.modeling.targets import suffix_pattern
from trainer.modeling.tensorfile import write_tensors

ADAPTER = "default"


def target_pattern(requested: str | Sequence[str], presets: Mapping[str, str], linears: Sequence[str]) -> str:
    """Regular expression over whole module names for a preset or for name suffixes.

    Raises ConfigError for an unknown preset and for suffixes that no linear layer has, listing what exists.
    """
    if isinstance(requested, str):
        if requested not in presets:
            raise ConfigError(
                f"{requested!r} is no preset of LoRA targets",
                where="lora.target_modules",
                remedy=f"use one of {', '.join(sorted(presets))}, or a list of module name suffixes",
            )
        return presets[requested]
    suffixes = sorted({re.sub(r"^.*\.\d+\.", "", name) for name in linears})
    endings = sorted({name.partition(".")[2] for name in suffixes if "." in name})
    problems = []
    for suffix in requested:
        if not any(name == suffix or name.endswith(f".{suffix}") for name in linears):
            close = difflib.get_close_matches(suffix, [*endings, *suffixes], n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            problems.append(
                Problem(
                    what=f"no linear layer is called {suffix!r}",
                    where="lora.target_modules",
                    remedy=f"{hint}known: {', '.join(suffixes)}",
                )
            )
    if problems:
        raise ConfigError(problems)
    return suffix_pattern(requested)


def linear_names(model: torch.nn.Module) -> list[str]:
    """Names of all linear layers, quantised ones included."""
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def add_lora(model: Any, *, rank: int, alpha: float, pattern: str, seed: int, device: str) -> None:
    """Inject a seeded LoRA (A gaussian, B zero, in the model's dtype) whose parameters alone are trainable.

    Raises ConfigError when the pattern matches no linear layer.
    """
    from peft import LoraConfig

    expression = re.compile(pattern)
    targets = [name for name in linear_names(model) if expression.fullmatch(name)]
    if not targets:
        raise ConfigError("the LoRA targets match no layer of this model", where="lora.target_modules")
    model.requires_grad_(False)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft only divides it by the rank
        target_modules=targets,
        init_lora_weights="gaussian",
    )
    with seeded(f"{seed}/lora", device):
        model.add_adapter(config, adapter_name=ADAPTER)
    to_model_type(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name), name


def to_model_type(model: Any) -> None:
    """Give the adapter the model's dtype: peft leaves another on layers whose weights are stored as bytes."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(model.dtype)


def remove_lora(model: Any) -> None:
    """Take the adapter off; the two libraries call it differently."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        model.delete_adapter(ADAPTER)
    else:
        model.delete_adapters(ADAPTER)


def adapter_state(model: Any) -> dict[str, torch.Tensor]:
    """peft's adapter tensors by name (`<module>.lora_A.weight`), contiguous, on the CPU."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def adapter_config(model: Any) -> dict[str, Any]:
    """The LoraConfig as plain values, in the form that diffusers writes into a file's metadata."""
    config = model.peft_config[ADAPTER].to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    # where the base was loaded from is a path of this machine
    plain["base_model_name_or_path"] = None
    return plain


def write_comfyui(
    state: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, str],
    *,
    alpha: float,
    key_of: Callable[[str], str | None],
) -> None:
    """Write the same adapter with ComfyUI's keys and an alpha tensor per layer; see `Family.comfyui_keys`.

    ComfyUI scales by alpha / rank and takes alpha as rank where it is missing. Raises DataError for a layer
    that
    ComfyUI does not know.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        module, _, part = name.partition(".lora_")
        prefix = key_of(module)
        if prefix is None:
            raise DataError(f"ComfyUI does not know the layer {module}", where="lora.target_modules")
        tensors[f"{prefix}.lora_{part}"] = tensor
        tensors[f"{prefix}.alpha"] = torch.tensor(float(alpha), dtype=torch.float32)
    write_tensors(path, tensors, {"format": "pt", **metadata}, None)


def effective_change(down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """The change of one weight, (out, in) fp32: scale * up @ down."""
    return scale * (up.float() @ down.float())
