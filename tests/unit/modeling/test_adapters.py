"""Kinds of adapters as peft builds them."""

from __future__ import annotations

from typing import Any

import torch

from trainer.config.schema import LoraSection
from trainer.modeling.adapter import lora
from trainer.modeling.vision import make_torchvision_importable

LINEARS = {"a.to_q": (24, 24), "a.to_k": (24, 36), "b.out": (17, 60)}
"""(out, in) by name."""


def built_size(section: LoraSection) -> int:
    """Parameters of an adapter on layers of these sizes."""
    make_torchvision_importable()
    from peft import inject_adapter_in_model

    model: Any = torch.nn.Module()
    for parent in dict.fromkeys(name.partition(".")[0] for name in LINEARS):
        model.add_module(parent, torch.nn.Module())
    for name, (out, into) in LINEARS.items():
        parent, _, own = name.partition(".")
        model.get_submodule(parent).add_module(own, torch.nn.Linear(into, out, bias=False))
    model.dtype = torch.float32
    model.add_adapter = lambda config, adapter_name: inject_adapter_in_model(config, model, adapter_name)
    lora.add_lora(
        model,
        rank=section.rank,
        alpha=section.alpha,
        pattern=".*",
        seed=0,
        device="cpu",
        kind=section.type,
        dropout=section.dropout,
        rank_pattern=section.rank_pattern,
        alpha_pattern=section.alpha_pattern,
    )
    return sum(value.numel() for value in model.parameters() if value.requires_grad)


def test_a_plain_lora_of_rank_one_is_a_row_and_a_column_a_layer() -> None:
    assert built_size(LoraSection(rank=1)) == sum(map(sum, LINEARS.values()))
