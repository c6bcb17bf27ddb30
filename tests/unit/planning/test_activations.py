"""Activation bytes of a micro-batch from counts of one block; every family has counts of its own stacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer import families
from trainer.config.schema import RunConfig
from trainer.families import language
from trainer.planning.shapes.activations import FULL, PLAIN, Activations, Held, activations, counted
from trainer.planning.shapes.geometry import stacks, table_component
from trainer.planning.shapes.run_shapes import component_config, run_geometry

COUNTS: dict[str, Any] = {
    "stacks": ["text", "image"],
    "captions": ["text"],
    "beside": {},
    "ways": {
        "eager": {"fixed": 1.0, "blocks": [10.0, 20.0], "beyond": 5.0},
        "eager, all linears": {"fixed": 1.0, "blocks": [14.0, 25.0], "beyond": 5.0},
        "eager, recomputed": {"fixed": 2.0, "blocks": [1.0, 1.0], "beyond": 30.0},
        "compiled": {"fixed": 0.0, "blocks": [8.0, 15.0], "beyond": 4.0},
        "compiled, all linears": {"fixed": 0.0, "blocks": [12.0, 20.0], "beyond": 4.0},
        "compiled, recomputed": {"fixed": 2.0, "blocks": [1.0, 1.0], "beyond": 20.0},
        "compiled, recomputed outside": {"fixed": 2.0, "blocks": [1.0, 1.0], "beyond": 25.0},
        "compiled, budget 0.6": {"fixed": 0.0, "blocks": [6.0, 10.0], "beyond": 6.0},
        "compiled, budget 0.2": {"fixed": 0.0, "blocks": [1.0, 2.0], "beyond": 6.0},
        "compiled, int8, budget 0.6": {"fixed": 0.0, "blocks": [2.0, 3.0], "beyond": 7.0},
    },
}


def found(*, compiled: bool = False, linear_inputs: bool = False, head: int = 0) -> Activations:
    return activations(
        COUNTS,
        {"image": 3, "text": 2},
        (100, 10),
        compiled=compiled,
        linear_inputs=linear_inputs,
        head=head,
    )


def test_each_block_keeps_its_count_of_the_tokens_it_sees() -> None:
    eager = found()
    assert eager.whole == Held(fixed=100, blocks=(100, 100, 2000, 2000, 2000), beyond=500)
    assert eager.peak() == eager.saved == 100 + 200 + 6000 + 500
    assert eager.peak(recomputed=5) == 200 + 20 + 300 + 3000
    assert not eager.shares


def test_inputs_of_all_linears_are_kept_beside_or_recomputed() -> None:
    wide = found(linear_inputs=True)
    assert wide.whole.blocks == (140, 140, 2500, 2500, 2500)
    assert wide.recomputed.blocks == found().recomputed.blocks
    assert wide.recomputed.beyond == 3000 + 500
    shares = found(compiled=True, linear_inputs=True).shares["", PLAIN]
    assert shares[0.6].blocks == (100, 100, 1500, 1500, 1500)


def test_the_first_blocks_are_recomputed_when_the_others_are_done() -> None:
    eager = found()
    assert eager.peak(recomputed=3) == max(
        10 + 10 + 100 + 100 + 2000 + 2000 + 500,  # where backward starts
        10 + 10 + 100 + 200 + 3000,  # where it recomputes
    )
    assert eager.peak(recomputed=1) == eager.peak() - 100 + 10


def test_a_budget_that_was_not_counted_needs_what_a_larger_one_does() -> None:
    compiled = found(compiled=True)
    assert compiled.peak(budget=0.6) == compiled.peak(budget=0.4) == 120 + 3000 + 600
    assert compiled.peak(budget=0.8) == compiled.saved


def test_small_budgets_are_planned_as_they_were_counted_with_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Budgets without counts for a kernel, or for FP8, are planned like the next larger budget."""
    compiled = found(compiled=True)
    large = 120 + 3000 + 600
    assert compiled.peak(budget=0.2) == 20 + 600 + 600
    assert compiled.peak(budget=0.2, flash=False) == compiled.peak(budget=0.2, weights="fp8") == large
    assert compiled.peak(budget=0.6, flash=False) == compiled.peak(budget=0.6, weights="fp8") == large
    for way, blocks in (("0.6", [5.0, 9.0]), ("0.2", [4.0, 6.0])):
        entry = {"fixed": 0.0, "blocks": blocks, "beyond": 7.0}
        monkeypatch.setitem(COUNTS["ways"], f"compiled, cudnn, budget {way}", entry)
    compiled = found(compiled=True)
    assert compiled.peak(budget=0.2) == 20 + 600 + 600
    assert compiled.peak(budget=0.2, flash=False) == 80 + 1800 + 700
    assert compiled.peak(budget=0.6, flash=False) == 100 + 2700 + 700
    assert compiled.peak(budget=0.2, weights="fp8") == large
    entry = {"fixed": 0.0, "blocks": [3.0, 5.0], "beyond": 7.0}
    monkeypatch.setitem(COUNTS["ways"], "compiled, fp8, cudnn, budget 0.2", entry)
    compiled = found(compiled=True)
    assert compiled.peak(budget=0.2, flash=False) == 80 + 1800 + 700
    for flash in (True, False):
        assert compiled.peak(budget=0.2, weights="fp8", flash=flash) == 60 + 1500 + 700
        assert compiled.peak(budget=0.6, weights="fp8", flash=flash) == large


def test_an_fp8_base_that_is_kept_twice_is_planned_whole_where_it_was_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Qwen-Image-Edit was seen to hold more of it than with a bf16 base."""
    compiled = found(compiled=True)
    whole = compiled.peak()
    assert compiled.peak(budget=0.6, weights="fp8", twice=True) == whole
    assert compiled.peak(budget=0.6, weights="fp8") < whole
    monkeypatch.setitem(COUNTS, "fp8_twice_as_bf16", True)
    compiled = found(compiled=True)
    assert compiled.peak(budget=0.6, weights="fp8", twice=True) == compiled.peak(budget=0.6, weights="fp8")


def test_packed_weights_keep_other_things_with_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = found(compiled=True)
    assert compiled.peak(budget=0.6, weights="int8", flash=False) == 40 + 900 + 700
    entry = {"fixed": 0.0, "blocks": [1.0, 1.0], "beyond": 9.0}
    monkeypatch.setitem(COUNTS["ways"], "compiled, int8, cudnn, budget 0.6", entry)
    compiled = found(compiled=True)
    assert compiled.peak(budget=0.6, weights="int8") == 40 + 900 + 700
    assert compiled.peak(budget=0.6, weights="int8", flash=False) == 20 + 300 + 900
    assert compiled.peak(budget=0.6, weights="nf4", flash=False) == compiled.peak(budget=0.6)


def test_a_budget_over_packed_weights_needs_what_was_counted_of_them() -> None:
    compiled = found(compiled=True)
    assert compiled.peak(budget=0.6, weights="int8") == 40 + 900 + 700
    assert compiled.peak(budget=0.6, weights="nf4") == compiled.peak(budget=0.6)
    assert compiled.peak(recomputed=5, weights="int8") == compiled.peak(recomputed=5)


def test_a_budget_needs_no_more_than_any_larger_one() -> None:
    """Not all budgets were counted with packed weights, and counts with other weights keep more."""
    way = {"fixed": 0.0, "blocks": [5.0, 9.0], "beyond": 6.0}
    counts = COUNTS | {"ways": COUNTS["ways"] | {"compiled, budget 0.4": way}}
    units = (100, 10)
    compiled = activations(counts, {"image": 3, "text": 2}, units, compiled=True, linear_inputs=False, head=0)
    assert compiled.peak(budget=0.4) == 100 + 2700 + 600 < compiled.peak(budget=0.6)
    assert compiled.peak(budget=0.4, weights="int8") == compiled.peak(budget=0.6, weights="int8")


def test_a_budget_that_was_counted_of_its_own_is_planned_so() -> None:
    """A model of few blocks may hold more under a smaller budget: kept are fewer, and many are recomputed."""
    way = {"fixed": 0.0, "blocks": [3.0, 3.0], "beyond": 90.0}
    for name, own in (("compiled, budget 0.4", {}), ("compiled, int8, budget 0.4", {"weights": "int8"})):
        counts = COUNTS | {"ways": COUNTS["ways"] | {name: way}}
        blocks = {"image": 3, "text": 2}
        compiled = activations(counts, blocks, (100, 10), compiled=True, linear_inputs=False, head=0)
        assert compiled.peak(budget=0.4, **own) == 60 + 900 + 9000 > compiled.peak(budget=0.6, **own)


def test_what_is_recomputed_from_outside_is_counted_of_its_own() -> None:
    """Where recomputing from outside has no counts of its own, the counts from inside are used."""
    compiled, eager = found(compiled=True), found()
    assert (compiled.outside.beyond, compiled.recomputed.beyond) == (2500, 2000)
    assert eager.outside == eager.recomputed


def test_a_head_counts_where_it_is_more_than_a_block_s_gradients() -> None:
    assert found(head=400).saved == found().saved
    assert found(head=700).saved == found().saved + 200
    assert found(head=700).peak(recomputed=5) == found().peak(recomputed=5)


@pytest.mark.parametrize("name", families.names())
def test_every_family_has_counts_of_all_its_stacks(name: str) -> None:
    family = families.get(name)
    part = table_component(name, family.trained_component, "trained")
    counts = counted(family.counted_as(component_config(family, None, family.trained_component)))
    assert {one.name for one in stacks(part, family.high_precision)} == set(counts["stacks"])
    assert set(counts["captions"]) <= set(counts["stacks"])
    for way, row in counts["ways"].items():
        assert len(row["blocks"]) == len(counts["stacks"]), way
        assert all(block > 0 for block in row["blocks"]), way
        # without the gradients of weights: where these train, the highest point may hold less than was kept
        least = -row["fixed"] - sum(row["blocks"]) if way.startswith(FULL) else 0.0
        assert row["beyond"] > least, way
    for style in ("eager", "compiled"):
        plain, wide, least = (
            counts["ways"][f"{style}{way}"] for way in ("", ", all linears", ", recomputed")
        )
        for block, more, less in zip(plain["blocks"], wide["blocks"], least["blocks"], strict=True):
            assert less <= block <= more


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def test_blocks_of_another_shape_keep_more_or_less() -> None:
    assert language.more_values(LLAMA_8B, linear_inputs=False) == (0.0, 0.0, 0.0)
    one = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}
    assert language.more_values({**one, "head_dim": 64}, linear_inputs=False)[0] == 3 * (4 - 3.5)
    assert language.more_values({**one, "head_dim": 64}, linear_inputs=True)[0] == 4 * (4 - 3.5)
    whole = {**LLAMA_8B, "num_key_value_heads": 32}
    assert language.more_values(whole, linear_inputs=False)[0] == 2 * 0.75
    more = activations(
        COUNTS,
        {"image": 3, "text": 2},
        (100, 10),
        compiled=False,
        linear_inputs=False,
        head=0,
        more=(1.5, 1.5, 0.0),
    )
    assert more.whole.blocks == (115, 115, 2150, 2150, 2150)
    assert more.recomputed.blocks == found().recomputed.blocks
    assert more.recomputed.beyond == found().recomputed.beyond + 150


def test_a_block_that_is_computed_again_holds_its_mlp_of_another_width() -> None:
    other = {**LLAMA_8B, "intermediate_size": 12288, "num_key_value_heads": 32}
    assert language.more_values(other, linear_inputs=False) == (0.0, -2.0, 0.0)
    for alike in ({"compiled": False}, {"trained": True}):
        assert language.more_values(other, linear_inputs=False, **alike) == (0.0, 0.0, 0.0)
    again = activations(
        COUNTS,
        {"image": 3, "text": 2},
        (100, 10),
        compiled=True,
        linear_inputs=True,
        head=0,
        more=(1.5, 4.0, 9.0),
    )
    assert again.recomputed.beyond == 2000 + 500 + 400


def test_a_wide_mlp_holds_more_in_its_backward_pass_than_the_last_norm() -> None:
    """An H200 held 13.87 values of Qwen2.5-7B uncompiled beyond those planned to be kept, of the 8B 9.0."""
    wide = {**LLAMA_8B, "hidden_size": 3584, "intermediate_size": 18944}
    more = language.more_values(wide, linear_inputs=False, compiled=False)
    assert 9.0 + more.beyond == pytest.approx(13.87, rel=0.01)
    for alike in ({}, {"compiled": False, "trained": True}):
        assert language.more_values(wide, linear_inputs=False, **alike).beyond == 0.0
    given = {"compiled": False, "linear_inputs": False, "head": 0}
    held = activations(COUNTS, {"image": 3, "text": 2}, (100, 10), **given, more=(1.5, 1.5, 4.0))
    assert held.whole.beyond == found().whole.beyond + 400


@pytest.mark.parametrize(
    ("changes", "dtype", "each"),
    [
        pytest.param({}, "bf16", 6, id="once"),
        pytest.param({}, "fp16", 12, id="fp16"),
        pytest.param({"lora__target_modules": ["q_proj", "lm_head"]}, "bf16", 12, id="adapter-on-the-head"),
    ],
)
def test_logits_that_exist_again_in_backward_take_twice_as_much(
    changes: dict[str, Any], dtype: str, each: int, config: Callable[..., RunConfig]
) -> None:
    family = families.get("llama")
    asked = config(family="llama", data__max_sequence_length=4096, train__train_batch_size=1, **changes)
    geometry = run_geometry(family, asked, model_folder=None, dtype=dtype)
    states = 4096 * 4096 * 2
    assert geometry.activations.head == 512 * 128_256 * each + states


def test_an_edit_model_without_its_own_modulation_of_controls_is_counted_as_qwen_image() -> None:
    family = families.get("qwen_image_edit")
    assert family.counted_as({"zero_cond_t": True}) == "qwen_image_edit"
    assert family.counted_as({"zero_cond_t": False}) == "qwen_image"


def test_what_is_kept_of_a_caption_beside_grows_with_the_caption() -> None:
    counts = {**COUNTS, "beside": {"image": 4.0}}
    held = activations(
        counts,
        {"image": 3, "text": 2},
        (100, 50),
        compiled=False,
        linear_inputs=False,
        head=0,
    )
    assert held.whole.blocks == (500, 500, 2200, 2200, 2200)
    assert held.recomputed.beyond == 3000 + 200
    assert held.recomputed.blocks == (50, 50, 100, 100, 100)


def test_frozen_linears_spare_no_more_than_was_counted_of_them() -> None:
    blocks, units = {"image": 3, "text": 2}, (100, 10)
    given: dict[str, Any] = {"compiled": False, "linear_inputs": True, "head": 0}
    spared = dict.fromkeys(blocks, (0, 10**12))
    assert activations(COUNTS, blocks, units, **given, spared=spared).whole == found().whole
    # of what they keep beside, as with the adapter of another rank, nothing is spared
    most, least = (
        activations(
            COUNTS, blocks, units, **{**given, "linear_inputs": bool(some)}, more=(2.0, 0.0, 0.0), spared=some
        )
        for some in (spared, {})
    )
    assert most.whole == least.whole
    whole, first = (
        activations(COUNTS, blocks, units, **given, spared=one).whole.blocks
        for one in ({}, {"image": (7, 0)})
    )
    assert sum(whole) - sum(first) == 7 * 3
