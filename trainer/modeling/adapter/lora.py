"""LoRA through the model's own `add_adapter`, and the files it is saved as."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from trainer.modeling.adapter.targets import in_any_order
from trainer.modeling.seeds import seeded

ADAPTER = "default"
_ALWAYS_SAID = frozenset(
    {"peft_type", "r", "lora_alpha", "alpha", "target_modules", "rank_pattern", "alpha_pattern"}
)


def linear_names(model: torch.nn.Module) -> list[str]:
    """Names of all linear layers, quantised ones included."""
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def add_lora(
    model: Any,
    *,
    rank: int,
    alpha: float,
    pattern: str,
    seed: int,
    device: str,
    kind: str = "lora",
    dropout: float = 0.0,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
) -> None:
    """Inject a seeded adapter (of a LoRA A gaussian, B zero; in the model's dtype) whose parameters alone are
    trainable. `kind` is that of `lora.type`, the patterns are peft's.

    `target_pattern` has checked that the names exist.
    """
    from peft import LoKrConfig, LoraConfig, PeftConfig

    expression = re.compile(pattern)
    targets = [name for name in linear_names(model) if expression.fullmatch(name)]
    assert targets, f"no linear layer matches {pattern}"
    common: dict[str, Any] = {
        "target_modules": targets,
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": dict(alpha_pattern or {}),
    }
    config: PeftConfig
    # peft's types say that an alpha is an integer; it only divides an alpha by a rank
    if kind == "lokr":
        config = LoKrConfig(r=rank, alpha=alpha, **common)  # type: ignore[arg-type]
    else:
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]
            lora_dropout=dropout,
            use_dora=kind == "dora",
            init_lora_weights="gaussian",
            **common,
        )
    model.requires_grad_(False)
    with seeded(f"{seed}/lora", device):
        model.add_adapter(config, adapter_name=ADAPTER)
    to_model_type(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == is_adapter(name), name


def is_adapter(name: str) -> bool:
    """True for the name of an adapter's parameter."""
    return ".lora_" in name or ".lokr_" in name


def to_model_type(model: Any) -> None:
    """Give the adapter the model's dtype: peft leaves another on layers whose weights are stored as bytes."""
    dtype = model.dtype  # asked once: diffusers walks all modules of the model for it
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)


def set_strength(model: torch.nn.Module, strength: float) -> None:
    """Multiply the adapter's change of each weight, as it was trained, by `strength`; of a DoRA its
    magnitudes stay, so that 0 is not the base.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            # of each kind of adapter's layer, not of their common class
            module.set_scale(ADAPTER, strength)  # type: ignore[operator]


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

    # peft would add the base's own weight of a head that has an adapter
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def adapter_config(model: Any) -> dict[str, Any]:
    """The LoraConfig as plain values, in the form that diffusers writes into a file's metadata; its patterns
    mean the same in the order that keys have in files.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = model.peft_config[ADAPTER].to_dict()
    plain: dict[str, Any] = {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.items()
    }
    adapted = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for key in ("rank_pattern", "alpha_pattern"):
        plain[key] = in_any_order(plain[key], adapted)
    # where the base was loaded from is a path of this machine
    plain["base_model_name_or_path"] = None
    return plain


def portable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an `adapter_config` that says something: diffusers hands all of it to the LoraConfig of the
    peft that is installed, and an older one ends at a key that it does not know.
    """
    from peft import get_peft_config

    standard = get_peft_config({"peft_type": config["peft_type"]}).to_dict()
    return {
        key: value
        for key, value in config.items()
        if key in _ALWAYS_SAID or (key in standard and key != "peft_version" and value != standard[key])
    }


def effective_change(down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """The change of one weight, (out, in) fp32: scale * up @ down."""
    return scale * (up.float() @ down.float())


def lokr_factor(parts: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """One factor of a Kronecker product, fp32: `lokr_w1` or `lokr_w2`, which may itself be of low rank."""
    if name in parts:
        return parts[name].float()
    return parts[f"{name}_a"].float() @ parts[f"{name}_b"].float()
