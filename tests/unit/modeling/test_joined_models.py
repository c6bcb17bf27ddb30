"""Trained linears of one input in small models of four families: which they are, and what they compute."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from tests.unit.modeling.small_models import FAMILIES, Case, case, difference, relative
from trainer.modeling.blocks.recompute import repeated_blocks
from trainer.modeling.blocks.same_input import same_inputs
from trainer.modeling.storage.fp8_trained import (
    Fp8TrainedLinear,
    WeightGradient,
    multiply_in_fp8,
    refresh_weights,
)
from trainer.modeling.storage.joined_trained import JoinedFp8Linear, JoinedLinear, join_trained

QKV = ("to_q", "to_k", "to_v")
# layers of each group in a block's order of calls, and how many such groups the small model has
GROUPS: dict[str, dict[tuple[str, ...], int]] = {
    "flux1_dev": {
        tuple(f"attn.{name}" for name in QKV): 1,
        ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"): 1,
        ("proj_mlp", *(f"attn.{name}" for name in QKV)): 2,
    },
    "qwen_image": {
        tuple(f"attn.{name}" for name in QKV): 2,
        ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"): 2,
    },
    "kandinsky5": {
        tuple(f"self_attention.to_{name}" for name in ("query", "key", "value")): 3,
        tuple(f"cross_attention.to_{name}" for name in ("key", "value")): 2,
    },
    "llama": {
        tuple(f"self_attn.{name}_proj" for name in "qkv"): 2,
        ("mlp.gate_proj", "mlp.up_proj"): 2,
    },
}
GROUPS["qwen2"] = GROUPS["qwen3"] = GROUPS["llama"]
ROUNDING = 1e-6


def trained(
    family: str, kind: str = "plain", *, joins: bool = True, dtype: torch.dtype | None = None
) -> Case:
    """A small model that trains in fp32 or `dtype`; in FP8 with this gradient of weights unless "plain"."""
    made = case(family, adapted=False)
    made.model.requires_grad_(True)
    if dtype is not None:
        made = in_dtype(made, dtype)
    names = same_inputs(made.model, made.predict, (torch.nn.Linear,))
    if kind != "plain":
        gradient: WeightGradient = "fp8" if kind == "fp8" else "bf16"
        make = functools.partial(Fp8TrainedLinear, copies=2, weight_gradient=gradient)
        assert multiply_in_fp8(made.model, made.family.high_precision, make)[0]
    if joins:
        wanted = GROUPS[family]
        joined = join_trained(made.model, names, repeated_blocks(made.model, made.family.blocks))
        assert joined.groups == sum(wanted.values())
        assert joined.layers == sum(len(group) * count for group, count in wanted.items())
    refresh_weights(made.model)
    return made


def in_dtype(made: Case, dtype: torch.dtype) -> Case:
    """The model and its inputs in another type."""

    def cast(values: Any) -> Any:
        return {n: one.to(dtype) if one.is_floating_point() else one for n, one in values.items()}

    kept = set(made.model._keep_in_fp32_modules or ())
    for name, one in made.model.named_parameters():
        if kept.isdisjoint(name.split(".")):
            one.data = one.data.to(dtype)
    batch = dataclasses.replace(made.batch, latents=cast(made.batch.latents), text=cast(made.batch.text))
    return dataclasses.replace(made, batch=batch)


def groups(model: torch.nn.Module) -> list[list[str]]:
    names = {id(module): name for name, module in model.named_modules()}
    firsts = [m for m in model.modules() if isinstance(m, JoinedLinear | JoinedFp8Linear) and m.place == 0]
    return [[names[id(member)] for member in first.shared.members] for first in firsts]


@pytest.mark.parametrize("kind", ["plain", "fp8"])
@pytest.mark.parametrize("family", sorted(GROUPS))
def test_layers_of_one_input_in_one_block_are_joined(family: str, kind: str) -> None:
    dtype = torch.bfloat16 if kind == "fp8" else None
    made = trained(family, kind, dtype=dtype)
    found = groups(made.model)
    for suffixes, count in GROUPS[family].items():
        same = [g for g in found if len(g) == len(suffixes) and all(map(str.endswith, g, suffixes))]
        assert len(same) == count, suffixes
    assert len(found) == sum(GROUPS[family].values())


@pytest.mark.parametrize("family", sorted(GROUPS))
def test_outputs_and_gradients_are_those_of_separate_layers(family: str) -> None:
    wanted_output, wanted = trained(family, joins=False).gradients()
    made = trained(family)
    for _ in range(2):  # nothing is left over from the first pass
        output, found = made.gradients()
        assert relative(output, wanted_output) < ROUNDING
        assert difference(found, wanted) < ROUNDING


@pytest.mark.parametrize("family", sorted(GROUPS))
def test_in_bf16_the_error_is_that_of_separate_layers(family: str) -> None:
    exact = trained(family, joins=False).gradients()[1]
    apart = trained(family, joins=False, dtype=torch.bfloat16).gradients()[1]
    found = trained(family, dtype=torch.bfloat16).gradients()[1]
    assert difference(found, exact) < 1.1 * difference(apart, exact)
    assert difference(found, apart) < 0.05


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("family", sorted(GROUPS))
def test_in_fp8_the_error_is_that_of_separate_layers(family: str, kind: str) -> None:
    exact = trained(family, joins=False).gradients()[1]
    wanted_output, apart = trained(family, kind, joins=False, dtype=torch.bfloat16).gradients()
    output, found = trained(family, kind, dtype=torch.bfloat16).gradients()
    assert relative(output, wanted_output) < 1e-2  # a value that rounds to the other side changes later ones
    assert difference(found, exact) < 1.1 * difference(apart, exact)


def test_all_families_of_small_models_are_tried() -> None:
    assert set(GROUPS) == set(FAMILIES)
