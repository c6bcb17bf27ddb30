"""Small frozen models of six families with a LoRA that changes them, and what they are run with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import FluxTransformer2DModel, Kandinsky5Transformer3DModel, QwenImageTransformer2DModel
from transformers import AutoConfig, AutoModelForCausalLM

from tests.quantized_layers import from_linear, nf4_linear
from trainer.config.schema import FlowSection
from trainer.families import draws
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.families.kandinsky5 import KANDINSKY5
from trainer.families.llama import LLAMA
from trainer.families.qwen2 import QWEN2
from trainer.families.qwen3 import QWEN3
from trainer.families.qwen_image import QWEN_IMAGE
from trainer.families.values import Batch, Draw, Shape
from trainer.modeling.adapter import lora
from trainer.modeling.attention.packed_rows import set_packed_attention
from trainer.modeling.storage.row_scaled import takes_fp8

Storage = Literal["plain", "int8", "nf4", "fp8", "fp8_two_copies"]

FAMILIES: dict[str, Any] = {
    "flux1_dev": FLUX1_DEV,
    "qwen_image": QWEN_IMAGE,
    "kandinsky5": KANDINSKY5,
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "flux1_dev": {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": False,
        "axes_dims_rope": (4, 6, 6),
    },
    "qwen_image": {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    },
    "kandinsky5": {
        "in_visual_dim": 4,
        "out_visual_dim": 4,
        "in_text_dim": 32,
        "in_text_dim2": 32,
        "time_dim": 32,
        "model_dim": 64,
        "ff_dim": 128,
        "num_text_blocks": 1,
        "num_visual_blocks": 2,
        "axes_dims": (4, 6, 6),
    },
    "llama": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    },
}
CONFIGS["qwen2"] = CONFIGS["llama"]
CONFIGS["qwen3"] = {**CONFIGS["llama"], "head_dim": 32}
_CLASSES: dict[str, Any] = {
    "flux1_dev": FluxTransformer2DModel,
    "qwen_image": QwenImageTransformer2DModel,
    "kandinsky5": Kandinsky5Transformer3DModel,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with everything that a forward pass of it takes."""

    family: Any
    model: Any
    batch: Batch
    draw: Draw | None
    settings: Any

    def predict(self) -> torch.Tensor:
        return self.family.predict(self.model, self.batch, self.draw, self.settings)

    def gradients(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The output of one pass, and the gradients of the LoRA for a loss that weighs each value its own."""
        self.model.zero_grad()
        output = self.predict()
        output.float().sin().sum().backward()
        found = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        return output.detach(), found


def case(
    family: str,
    *,
    storage: Storage = "plain",
    preset: str = "attention",
    size: int = 64,
    changes: Mapping[str, Any] | None = None,
    adapted: bool = True,
) -> Case:
    """A small model in fp32, equal weights every time; `size` are pixels of the image's sides."""
    config = {**CONFIGS[family], **(changes or {})}
    torch.manual_seed(0)
    if FAMILIES[family].sample_kind == "conversation":
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
        set_packed_attention(model, "math")
    else:
        model = _CLASSES[family](**config)
    for name, parameter in model.named_parameters():
        # start at zero or one, which would hide what happens in the blocks
        if "modulation" in name or name.endswith(("_proj.bias", "q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(parameter, std=0.1)
    model.requires_grad_(False)
    chosen = FAMILIES[family]
    if storage != "plain":
        quantize(model, chosen.high_precision, storage)
    if adapted:
        adapt(model, chosen.lora_targets[preset])
    return with_inputs(family, model.train(), size)


def with_inputs(family: str, model: Any, size: int) -> Case:
    """`model` with a batch of another size."""
    chosen = FAMILIES[family]
    shape = Shape(batch_size=1, width=size, height=size, text_tokens=16, bytes_per_value=4)
    batch = chosen.synthetic_batch(CONFIGS[family], shape, seed=1)
    settings = draws.FlowSettings(
        sigmas=torch.linspace(1000, 1, 1000) / 1000,
        flow=FlowSection(),
        seed=3,
        scheduler={"use_dynamic_shifting": False},
    )
    header = {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}
    draw = chosen.draw(settings, [0], header)
    return Case(family=chosen, model=model, batch=batch, draw=draw, settings=settings)


def modulation(one: Case) -> list[Any]:
    """The modules whose weights no backward pass reads, where nothing of forward is repeated."""
    taken = re.compile("|".join(one.family.modulation) or "(?!)")
    return [module for name, module in one.model.named_modules() if taken.fullmatch(name)]


def adapt(model: Any, pattern: str, *, device: str = "cpu") -> None:
    """A LoRA whose second halves are not zero."""
    lora.add_lora(model, rank=4, alpha=8, pattern=pattern, seed=0, device=device)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)


def quantize(model: Any, high_precision: tuple[str, ...], storage: Storage) -> None:
    """Put quantised layers in the place of the linears that are not of `high_precision`."""
    keep = re.compile("|".join(high_precision))
    for name in lora.linear_names(model):
        linear = model.get_submodule(name)
        if keep.fullmatch(name) or not takes_fp8(linear):
            continue
        parent, _, attribute = name.rpartition(".")
        model.get_submodule(parent).register_module(attribute, _quantized(linear, storage))


def _quantized(linear: torch.nn.Linear, storage: Storage) -> torch.nn.Linear:
    if storage == "nf4":
        return nf4_linear(linear)
    kind: Literal["int8", "fp8"] = "int8" if storage == "int8" else "fp8"
    copies = 2 if storage == "fp8_two_copies" else 1
    return from_linear(linear, kind, fp8_compute=kind == "fp8", copies=copies)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float(((found.float() - wanted.float()).norm() / wanted.float().norm()).item())


def difference(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """`relative` of all tensors as one long vector."""
    assert set(found) == set(wanted) and found
    names = sorted(wanted)
    left, right = (torch.cat([tensors[n].flatten() for n in names]) for tensors in (found, wanted))
    return relative(left, right)
