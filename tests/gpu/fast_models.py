"""A small transformer on the device, as a plain run and as a fast one build it, and what it is run with."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from tests.quantized_layers import from_linear
from tests.unit.modeling.small_models import Storage, adapt, quantize
from trainer.config.schema import FlowSection
from trainer.engine.building.fast import Fused, fuse
from trainer.engine.optimizing.fp32_masters import FlatMasters
from trainer.engine.training.graphs import Graphs
from trainer.families import draws
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.families.values import Batch, Draw, Shape
from trainer.modeling.adapter import lora
from trainer.modeling.attention.setting import set_attention
from trainer.modeling.blocks.compiled import compile_blocks, eager, varying_sizes
from trainer.modeling.blocks.recompute import recompute_blocks, repeated_blocks

DEVICE = "cuda"
PACKED = "fp8, modulation in int8"
"""FP8 in one copy, with what is stored beside it where memory is scarce."""
CONFIG = {
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 8,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 128,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
SETTINGS = draws.FlowSettings(
    sigmas=torch.linspace(1000, 1, 1000) / 1000,
    flow=FlowSection(),
    seed=0,
    scheduler={"use_dynamic_shifting": False},
)


def build(
    storage: str = "bf16", *, fast: bool, trained: bool = True, recomputed: int = 0, varies: bool = False
) -> Any:
    """A small model in bf16 with a LoRA, and what a run does for speed; `trained`: the LoRA is not zero;
    `recomputed` are its first blocks that are recomputed; `varies`: compiled for every size and batch.
    """
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = FluxTransformer2DModel(**CONFIG).to(torch.bfloat16)
    model.requires_grad_(False)
    if storage != "bf16":
        kinds: dict[str, Storage] = {"int8": "int8", "nf4": "nf4", PACKED: "fp8"}
        quantize(model, FLUX1_DEV.high_precision, kinds.get(storage, "fp8_two_copies"))
    if storage == PACKED:
        _pack_modulation(model)
    pattern = FLUX1_DEV.lora_targets["attention"]
    if trained:
        adapt(model, pattern, device=str(model.device))
    else:
        lora.add_lora(model, rank=4, alpha=8, pattern=pattern, seed=0, device=str(model.device))
    set_attention(model, "flash")
    model.train()
    if recomputed:
        recompute_blocks(repeated_blocks(model, FLUX1_DEV.blocks), recomputed, inside=fast)
    if fast:

        def run(side: int = 512, tall: int = 512, size: int = 1) -> None:
            with torch.no_grad():
                FLUX1_DEV.predict(model, *inputs(0, side, tall, size), SETTINGS)

        activations = 4 if storage in ("fp8", PACKED) else 0
        # nf4 weights cannot be one
        joined = 0 if storage == "nf4" else 12
        assert fuse(model, run) == Fused(joined=joined, norms=8, rotations=3, activations=activations)
        runs = [run, partial(run, 1024), partial(run, tall=1024), partial(run, size=2)]
        varying = varying_sizes(repeated_blocks(model, FLUX1_DEV.blocks), runs) if varies else {}
        assert (
            compile_blocks(repeated_blocks(model, FLUX1_DEV.blocks), activation_budget=1.0, varying=varying)
            == 3
        )
    return model


def _pack_modulation(model: Any) -> None:
    """Replace modulation layers with int8 ones, which stay out of FP8 products, like `replacer` does."""
    taken = re.compile("|".join(FLUX1_DEV.modulation))
    for name in filter(taken.fullmatch, lora.linear_names(model)):
        parent, _, attribute = name.rpartition(".")
        packed = from_linear(model.get_submodule(name), "int8", fp8_compute=False, copies=1)
        model.get_submodule(parent).register_module(attribute, packed)


def inputs(number: int, side: int = 512, tall: int = 0, size: int = 1) -> tuple[Batch, Draw]:
    """A batch of one or several and a draw, other ones for each number; square, if `tall` is not said."""
    shape = Shape(batch_size=size, width=side, height=tall or side, text_tokens=128, bytes_per_value=2)
    batch = FLUX1_DEV.synthetic_batch(CONFIG, shape, seed=number)
    header = {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}
    draw = FLUX1_DEV.draw(SETTINGS, range(number, number + size), header)
    latents = {name: tensor.to(DEVICE) for name, tensor in batch.latents.items()}
    text = {name: tensor.to(DEVICE, torch.bfloat16) for name, tensor in batch.text.items()}
    moved = Draw(**{name: tensor.to(DEVICE) for name, tensor in vars(draw).items()})
    return Batch(latents=latents, text=text, size=size, weight=float(size)), moved


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


class Computed:
    """A model's loss whose gradients are summed in masters, as the loop computes it."""

    def __init__(self, model: Any) -> None:
        self.model, self.masters = model, FlatMasters(trainable(model))
        self.calls = 0

    def __call__(self, batch: Batch, draw: Draw | None, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = FLUX1_DEV.loss(self.model, batch, draw, SETTINGS).sum() / weight
        loss.backward()
        self.masters.accumulate()
        return loss.detach()

    def predict(self, batch: Batch, draw: Draw | None) -> None:
        """Forward alone, as it is written."""
        assert draw is not None
        with torch.no_grad(), eager():
            FLUX1_DEV.predict(self.model, batch, draw, SETTINGS)

    def run(self, graphs: Graphs | None, plan: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and summed gradients of the (number, side) of `plan`."""
        self.masters.drop_gradients()
        losses = []
        for number, side in plan:
            weight = torch.tensor(1.0 + number, device=DEVICE)
            losses.append(float((graphs or self)(*inputs(number, side), weight).item()))
        return torch.tensor(losses), self.masters.gradient.clone()
