"""Blocks of transformers models that recompute themselves, compiled and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.modeling.small_models import FAMILIES, case, difference, relative, with_inputs
from trainer.modeling.adapter.joined_lora import join_siblings
from trainer.modeling.attention.setting import set_attention
from trainer.modeling.base.load import build_structure, fill_structure
from trainer.modeling.base.source import ModelSource
from trainer.modeling.blocks import recompute
from trainer.modeling.blocks.compiled import compile_blocks, graphs_compiled
from trainer.modeling.blocks.recompute import Recomputed, give_base, recompute_blocks, repeated_blocks
from trainer.modeling.storage.host_blocks import HostMemory, spread_blocks
from trainer.modeling.storage.staging import Staged
from trainer.planning.shapes.activations import counted


def test_outputs_and_gradients_stay_bit_for_bit() -> None:
    one, other = case("llama"), case("llama")
    recompute_blocks(repeated_blocks(one.model, one.family.blocks))
    for _ in range(2):
        (output, found), (wanted_output, wanted) = one.gradients(), other.gradients()
        assert torch.equal(output, wanted_output)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("random", [frozenset(), frozenset({""})], ids=["files", "random"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_attention_dropout_of_a_base_changes_no_gradient(
    family: str, random: frozenset[str], tmp_path: Path
) -> None:
    """Its masks were other ones where blocks are recomputed: gradients were not those of the loss."""
    plain = case(family, adapted=False)
    plain.model.config.attention_dropout = 0.5
    plain.model.save_pretrained(tmp_path)
    source = ModelSource(folder=tmp_path, identity="x", revision=None, random_components=random, seed=0)

    def gradients(*, again: bool) -> dict[str, torch.Tensor]:
        kind = type(plain.model)
        structure = build_structure(kind, source, "", device="cpu", dtype=torch.float32, replace=None)
        model: Any = fill_structure(structure)
        set_attention(model, "native")
        blocks = repeated_blocks(model, plain.family.blocks)
        if again:
            recompute_blocks(blocks, draws=recompute.has_dropout(model))
        one = with_inputs(family, model.train().requires_grad_(True), 64)
        return one.gradients()[1]

    wanted, found, once_more = gradients(again=False), gradients(again=True), gradients(again=False)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert all(torch.equal(once_more[name], value) for name, value in wanted.items())


def test_what_tells_the_device_of_random_numbers_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for it among arguments without one, and diffusers calls blocks with names."""
    seen: list[tuple[bool, bool]] = []

    def recorded(call: Any, *values: Any, preserve_rng_state: bool, **_: Any) -> Any:
        seen.append((any(isinstance(value, torch.Tensor) for value in values), preserve_rng_state))
        return call(*values)

    monkeypatch.setattr(recompute, "checkpoint", recorded)
    one = case("flux1_dev")
    recompute_blocks(repeated_blocks(one.model, one.family.blocks), draws=True)
    one.predict()
    assert seen == 3 * [(True, True)]


def test_a_block_is_recomputed_once_and_only_for_gradients() -> None:
    one = case("llama")
    calls: list[int] = []
    for layer in one.model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for _ in range(2):  # said twice is said once
        recompute_blocks(repeated_blocks(one.model, one.family.blocks))
    one.gradients()
    assert len(calls) == 4
    with torch.no_grad():
        one.predict()
    assert len(calls) == 6


def test_blocks_keep_the_name_of_their_class_and_share_one() -> None:
    model: Any = case("llama").model
    kinds = {type(layer) for layer in model.model.layers}
    recompute_blocks(repeated_blocks(model, FAMILIES["llama"].blocks))
    made = {type(layer) for layer in model.model.layers}
    assert len(kinds) == len(made) == 1 and kinds != made
    assert {kind.__name__ for kind in made} == {"LlamaDecoderLayer"}
    block = torch.nn.Linear(2, 2)
    give_base(block, Recomputed)
    assert isinstance(block, Recomputed) and isinstance(block, torch.nn.Linear)


def test_the_first_blocks_alone_recompute_and_all_are_of_one_class() -> None:
    changes = {"num_layers": 2, "num_single_layers": 3}
    one, other = case("flux1_dev", changes=changes), case("flux1_dev", changes=changes)
    assert recompute_blocks(repeated_blocks(one.model, one.family.blocks), 3) == 3
    calls: list[int] = []
    blocks = [*one.model.transformer_blocks, *one.model.single_transformer_blocks]
    for number, block in enumerate(blocks):
        block.attn.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    (output, found), (wanted_output, wanted) = one.gradients(), other.gradients()
    assert calls == [0, 1, 2, 3, 4, 2, 1, 0]
    assert torch.equal(output, wanted_output)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert [len({type(block) for block in part}) for part in (blocks[:2], blocks[2:])] == [1, 1]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_blocks_come_in_the_order_in_which_they_are_counted(name: str) -> None:
    model = case(name).model
    kinds = FAMILIES[name].blocks
    found = [path.rpartition(".")[0] for path, part in model.named_modules() if type(part).__name__ in kinds]
    assert list(dict.fromkeys(found)) == counted(FAMILIES[name].counted_as(model.config))["stacks"]


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("waiting", [0, 2])
def test_compiled_blocks_with_joined_layers_recompute(waiting: int) -> None:
    """One graph for blocks whose inputs have gradients, and one for those that wait."""
    one, other = (case("llama", changes={"num_hidden_layers": 4}) for _ in range(2))
    for each in (one, other):
        each.model.model.embed_tokens.requires_grad_(True)
    wanted_output, wanted = other.gradients()
    blocks = repeated_blocks(one.model, one.family.blocks)
    elsewhere = [blocks[name] for name in spread_blocks(blocks, waiting)]
    staged = Staged(HostMemory(elsewhere, pinned=False), "cpu") if waiting else None
    recompute_blocks(blocks, inside=not waiting)

    def run() -> None:
        one.predict()
        if staged is not None:
            staged.unpack()

    assert join_siblings(one.model, run) == 4 * 3
    if staged is not None:
        staged.pack()
    assert compile_blocks(repeated_blocks(one.model, one.family.blocks), activation_budget=1.0) == 4
    for _ in range(2):
        output, found = one.gradients()
        assert relative(output, wanted_output) < 1e-5
        assert difference(found, wanted) < 1e-5
    assert graphs_compiled() == (2 if waiting else 1)
