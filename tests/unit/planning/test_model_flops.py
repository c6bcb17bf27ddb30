"""FLOP of samples beside torch's own counter, on models of full width without values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.floor import count_work
from tests import random_bases
from trainer.families import get, names
from trainer.families.family import Family
from trainer.families.values import Shape
from trainer.planning.shapes.geometry import table_component
from trainer.planning.shapes.model_flops import ModelFlops, model_flops
from trainer.planning.shapes.run_shapes import component_config

BLOCKS = ("num_layers", "num_single_layers", "num_text_blocks", "num_visual_blocks", "num_hidden_layers")
"""Names of configs' numbers of blocks."""


def flops_of(family: str, method: str = "lora") -> ModelFlops:
    one = get(family)
    component = table_component(family, one.trained_component, "trained")
    return model_flops(one, method, component_config(one, None, one.trained_component), component)


def counted(family: Family, base: Path, shape: Shape) -> float:
    """Work of the model with all of its blocks, by what one block more of each kind adds to one of each."""
    path = base / family.trained_component / "config.json"
    config = json.loads(path.read_text())
    depths = {name: config[name] for name in BLOCKS if name in config}

    def work(**changes: int) -> float:
        path.write_text(json.dumps({**config, **dict.fromkeys(depths, 1), **changes}))
        found = count_work(family, base, shape)
        return found.linear + found.attention

    once = work()
    return once + sum((depth - 1) * (work(**{name: 2}) - once) for name, depth in depths.items())


@pytest.mark.parametrize("family", names())
def test_they_are_those_of_torchs_counter(family: str, tmp_path: Path) -> None:
    """Of a language model's, whose attention the counter sees whole, by the sum of its weights."""
    one, width, height = get(family), 512, 768
    tokens = 64 if one.sample_kind == "image" else 4096
    shape = Shape(
        batch_size=1,
        width=width,
        height=height,
        text_tokens=tokens,
        bytes_per_value=2,
        controls=one.control_counts[0],
    )
    random_bases.build(family, "full", tmp_path / family, weights=False)
    found = flops_of(family).of(tokens=tokens, width=width, height=height, controls=shape.controls)
    # forward and backward; embedders and modulation are left out
    assert found == pytest.approx(2e12 * counted(one, tmp_path / family, shape), rel=2e-3)


def test_trained_weights_have_a_gradient_each() -> None:
    size = {"tokens": 512, "width": 1024, "height": 1024}
    assert flops_of("flux1_dev", "full").of(**size) == 1.5 * flops_of("flux1_dev").of(**size)


def test_a_llama_of_8b_does_what_is_published_of_it() -> None:
    """Six times the parameters a token, without the embedding, and attention."""
    parameters = 8.03e9 - 128256 * 4096
    attention = 3 * 2 * 4096**2 * 4096 * 32
    assert flops_of("llama", "full").of(tokens=4096) == pytest.approx(
        6 * parameters * 4096 + attention, rel=1e-3
    )
