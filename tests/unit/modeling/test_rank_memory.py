"""Bytes that a plan adds for ranks above the counted one, beside the bytes that autograd keeps."""

from __future__ import annotations

import re

import pytest

from tests.numerics.saved import kept_bytes
from tests.unit.modeling.small_models import Case, case
from trainer.config.schema import LoraSection
from trainer.modeling.adapter import lora
from trainer.modeling.adapter.joined_lora import join_siblings
from trainer.planning.shapes import adapters
from trainer.planning.shapes.adapters import COUNTED_RANK

HIGHER = 48
DEPTH = {"num_layers": 1, "num_single_layers": 1}
IMAGE_TOKENS = 16
"""Tokens of the 64 px pictures that a small model is given."""
TEXT = re.compile(r"add_[qkv]_proj|to_add_out|ff_context")


def small(rank: int, preset: str) -> Case:
    """A model whose layers are joined as a run joins them."""
    one = case("flux1_dev", changes=DEPTH, adapted=False)
    pattern = one.family.lora_targets[preset]
    lora.add_lora(one.model, rank=rank, alpha=rank, pattern=pattern, seed=0, device="cpu")
    assert join_siblings(one.model, one.predict)
    return one


def added(one: Case, rank: int, preset: str) -> int:
    """Bytes that a plan adds for the rank."""
    names = [name for name in lora.linear_names(one.model) if ".lora_" not in name]
    layers = {name.removesuffix(".base_layer"): one.model.get_submodule(name) for name in names}
    tokens = {name: int(one.batch.text["prompt_embeds"].shape[1]) for name in layers if TEXT.search(name)}
    every = IMAGE_TOKENS + next(iter(tokens.values()))

    def tokens_of(name: str) -> int:
        return every if name.startswith("single") else tokens.get(name, IMAGE_TOKENS)

    targets = re.compile(one.family.lora_targets[preset])
    adapted = {
        name: (layer.out_features, layer.in_features)
        for name, layer in layers.items()
        if targets.fullmatch(name)
    }
    blocks, beyond = adapters.kept_bytes(adapted, LoraSection(rank=rank), tokens_of, 4)
    assert beyond == 0
    return sum(blocks.values())


@pytest.mark.parametrize("preset", ["attention", "all-linear"])
def test_a_higher_rank_keeps_what_the_plan_adds(preset: str) -> None:
    counted, higher = small(COUNTED_RANK, preset), small(HIGHER, preset)
    more = kept_bytes(higher.model, lambda: higher.predict().sum())
    more -= kept_bytes(counted.model, lambda: counted.predict().sum())
    assert added(higher, HIGHER, preset) == pytest.approx(more, rel=0.05)
    assert added(counted, COUNTED_RANK, preset) == 0
