"""Kinds of adapters as peft builds them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from trainer.config.schema import LoraSection
from trainer.modeling.adapter import lora
from trainer.modeling.adapter.targets import in_any_order, pattern_value
from trainer.modeling.vision import make_torchvision_importable

LINEARS = {"a.to_q": (24, 24), "a.to_k": (24, 36), "b.out": (17, 60)}
"""(out, in) by name."""


def built(section: LoraSection) -> Any:
    """A model of layers of these sizes with an adapter."""
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
    return model


def built_size(section: LoraSection) -> int:
    """Parameters of an adapter on layers of these sizes."""
    return sum(value.numel() for value in built(section).parameters() if value.requires_grad)


def test_a_plain_lora_of_rank_one_is_a_row_and_a_column_a_layer() -> None:
    assert built_size(LoraSection(rank=1)) == sum(map(sum, LINEARS.values()))


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ({"to_q": 2, "out": 3}, {"to_q": 2, "out": 3}),  # in either order
        ({"to_q": 2, ".*": 3}, {r"^a\.to_q": 2, r"^a\.to_k": 3, r"^b\.out": 3}),
        ({".*": 3, "to_q": 2}, {".*": 3, "to_q": 2}),  # the second is never read
        ({"to_q": 2, "(a|c).*": 3}, {r"^a\.to_q": 2, r"^a\.to_k": 3}),
    ],
)
def test_patterns_mean_the_same_in_the_order_of_a_file(
    pattern: dict[str, int], wanted: dict[str, int]
) -> None:
    assert in_any_order(pattern, LINEARS) == wanted
    section = LoraSection(rank=4, alpha=8, rank_pattern=pattern, alpha_pattern=pattern)
    model = built(section)
    model.peft_config = {lora.ADAPTER: model.peft_config[lora.ADAPTER]}
    written = json.loads(json.dumps(lora.adapter_config(model), sort_keys=True, default=str))
    for name in LINEARS:
        layer = model.get_submodule(name)
        rank = pattern_value(written["rank_pattern"], name, 4)
        assert layer.lora_A["default"].weight.shape[0] == rank
        assert layer.scaling["default"] == pattern_value(written["alpha_pattern"], name, 8) / rank


def test_patterns_give_layers_their_own_rank_and_alpha() -> None:
    section = LoraSection(rank=4, alpha=8, rank_pattern={"to_q": 2, "out": 3}, alpha_pattern={"to_k": 1})
    model = built(section)
    for name, (rank, alpha) in {"a.to_q": (2, 8), "a.to_k": (4, 1), "b.out": (3, 8)}.items():
        layer, inputs = model.get_submodule(name), torch.randn(5, LINEARS[name][1])
        down, up = layer.lora_A["default"].weight, torch.randn(LINEARS[name][0], rank)
        assert down.shape == (rank, LINEARS[name][1])
        layer.lora_B["default"].weight.data = up
        change = layer(inputs) - layer.base_layer(inputs)
        assert torch.allclose(change, alpha / rank * inputs @ down.T @ up.T, rtol=1e-4, atol=1e-5), name
