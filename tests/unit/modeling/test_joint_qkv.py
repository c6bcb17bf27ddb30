"""Queries, keys and values of a joint product in one pass: the same numbers as apart, and which layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from tests.numerics.saved import kept_bytes
from tests.reached import reach
from tests.unit.modeling.small_models import Case, case, difference, relative
from tests.unit.modeling.streams import LowRank, WidePart, norm_rotary, wide_norm_rotary
from tests.unit.modeling.test_rotary import EPS, GRAPHS, LAYERS, ROUNDING, pair, same, tables
from trainer.modeling.adapter.joined_lora import join_siblings, joined_parts, part_siblings
from trainer.modeling.adapter.low_rank import add_low_rank
from trainer.modeling.blocks.compiled import graphs_compiled
from trainer.modeling.fused import rotary
from trainer.modeling.fused.norm_rotary import Stream
from trainer.modeling.fused.norms import fuse_head_norms
from trainer.modeling.fused.rotary import fuse_rotary

HEADS = 3
# attention layers of each small model whose product is one: not those beside a feed-forward
WIDE = {"flux1_dev": 1 + 2, "flux2_dev": 1, "qwen_image": 2}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# the function


def wide_part(tokens: int, kind: str, *, width: int = 32, dtype: torch.dtype = torch.float32) -> WidePart:
    """A product with sizes that differ by token, weights, and tables."""
    sizes = torch.logspace(-2, 2, tokens)[:, None]
    wide = (torch.randn(2, tokens, 3 * HEADS * width) * sizes).to(dtype)
    weights = [torch.rand(width).add(0.5).to(dtype) for _ in range(2)]
    return wide, weights[0], weights[1], *tables(tokens, width, kind)


def apart(first: WidePart, second: WidePart | None, eps: float) -> tuple[torch.Tensor, ...]:
    """Queries and keys each by themselves, and values."""
    streams = [one for one in (first, second) if one is not None]
    heads = [one[0].unflatten(-1, (3, HEADS, -1)).unbind(2) for one in streams]
    turned = []
    for which in range(2):
        parts = [(h[which], one[1 + which], *one[3:]) for h, one in zip(heads, streams, strict=True)]
        turned.append(norm_rotary(parts[0], parts[1] if second else None, eps))
    return *turned, torch.cat([values for *_, values in heads], dim=1)


def run(compute: Any, first: WidePart, second: WidePart | None) -> list[torch.Tensor]:
    """Outputs, and gradients of the products."""
    parts = [(one[0].detach().clone().requires_grad_(True), *one[1:]) for one in (first, second) if one]
    outputs = compute(parts[0], parts[1] if second else None, EPS)
    # values weigh less: their gradients are the largest
    torch.cat(
        [one.float().sin() * weight for one, weight in zip(outputs, (1, 2, 0.5), strict=True)]
    ).sum().backward()
    return [*(one.detach() for one in outputs), *(one[0].grad for one in parts)]


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [(7, 0), (5, 9)])
def test_outputs_and_gradients_are_those_of_the_parts(
    kind: str, dtype: torch.dtype, tokens: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    first, second = (wide_part(count, kind, dtype=dtype) if count else None for count in tokens)
    assert first is not None
    wanted, found = run(apart, first, second), run(wide_norm_rotary, first, second)
    assert len(found) == len(wanted) == (4 if second is None else 5)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_what_attention_gets_lies_in_one_piece() -> None:
    """Values of one stream are where they were: a copy would be kept for backward beside the product."""
    first, second = wide_part(7, "real"), wide_part(5, "real")
    assert all(one.is_contiguous() for one in wide_norm_rotary(first, second, EPS))
    query, key, value = wide_norm_rotary(first, None, EPS)
    assert query.is_contiguous() and key.is_contiguous()
    assert value.untyped_storage().data_ptr() == first[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("joined", [False, True])
def test_only_what_it_is_given_is_kept_for_backward(joined: bool) -> None:
    parts = [wide_part(7, "real"), wide_part(5, "real")][: 1 + joined]
    leaves = [(one[0].requires_grad_(True), *one[1:]) for one in parts]
    weights = torch.nn.ParameterList([weight for one in leaves for weight in one[1:3]])
    given = sum(tensor.numel() * 4 for one in leaves for tensor in (one[0], *one[3:]))
    second = leaves[1] if joined else None
    assert kept_bytes(weights, lambda: wide_norm_rotary(leaves[0], second, EPS)) == given


def test_gradients_of_any_strides() -> None:
    torch.manual_seed(0)
    first = wide_part(7, "complex")
    found = []
    for turned in (False, True):
        leaf = first[0].detach().clone().requires_grad_(True)
        outputs = wide_norm_rotary((leaf, *first[1:]), None, EPS)
        torch.manual_seed(1)
        gradients = [torch.randn(one.shape) for one in outputs]
        if turned:
            gradients = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in gradients]
        torch.autograd.backward(outputs, gradients)
        found.append(leaf.grad)
    assert torch.equal(*found)


# with what adapters add


def low_rank(
    tokens: int, ranks: tuple[int, int, int], *, width: int = 32, dtype: torch.dtype = torch.float32
) -> LowRank:
    hidden = torch.randn(2, tokens, sum(ranks)).to(dtype)
    return hidden, tuple(torch.randn(HEADS * width, rank).to(dtype) for rank in ranks)


def added_before(first: WidePart, second: WidePart, eps: float, added: tuple[LowRank, LowRank]) -> Any:
    """LoRA deltas added in a separate pass over each product."""
    parts = [
        (add_low_rank(part[0], hidden, *ups), *part[1:])
        for part, (hidden, ups) in zip((first, second), added, strict=True)
    ]
    return wide_norm_rotary(parts[0], parts[1], eps)


def run_added(
    compute: Any, parts: list[WidePart], added: list[LowRank], gradients: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Outputs, and gradients of both products, both `hidden` and all `ups`, on the CPU."""

    def leaf(one: torch.Tensor) -> torch.Tensor:
        return one.detach().clone().requires_grad_(True)

    parts = [(leaf(one[0]), *one[1:]) for one in parts]
    added = [(leaf(hidden), tuple(leaf(up) for up in ups)) for hidden, ups in added]
    outputs = compute(parts[0], parts[1], EPS, (added[0], added[1]))
    torch.autograd.backward(outputs, gradients)
    leaves = [*(one[0] for one in parts), *(one for hidden, ups in added for one in (hidden, *ups))]
    return [one.detach().cpu() for one in (*outputs, *(one.grad for one in leaves))]


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [((4, 4, 4), (4, 4, 4)), ((5, 5, 5), (3, 3, 3)), ((4, 2, 4), (1, 1, 6))])
def test_a_sum_on_the_way_is_that_of_a_pass_of_its_own(
    kind: str, dtype: torch.dtype, ranks: tuple[tuple[int, int, int], ...]
) -> None:
    """To the last bit, with the gradients of all."""
    torch.manual_seed(0)
    tokens = (5, 9)
    parts = [wide_part(count, kind, dtype=dtype) for count in tokens]
    added = [low_rank(count, each, dtype=dtype) for count, each in zip(tokens, ranks, strict=True)]
    gradients = [torch.randn(2, sum(tokens), HEADS, 32).to(dtype) for _ in range(3)]
    wanted = run_added(added_before, parts, added, gradients)
    found = run_added(wide_norm_rotary, parts, added, gradients)
    assert len(found) == len(wanted) == 3 + 2 + 2 * 4
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_the_sum_is_not_kept_for_backward() -> None:
    parts = [wide_part(7, "real"), wide_part(5, "real")]
    added = [low_rank(7, (4, 4, 4)), low_rank(5, (2, 2, 2))]
    leaves = [(one[0].requires_grad_(True), *one[1:]) for one in parts]
    kept = [one for part in leaves for one in (part[0], *part[3:])] + [hidden for hidden, _ in added]
    blocks = sum(HEADS * 32 * 3 * 3 * len(ups[0][0]) for _, ups in added)
    given = (sum(tensor.numel() for tensor in kept) + blocks) * 4
    weights = torch.nn.ParameterList([weight for one in leaves for weight in one[1:3]])
    found = kept_bytes(weights, lambda: wide_norm_rotary(leaves[0], leaves[1], EPS, (added[0], added[1])))
    assert found == given


# models


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of streams in each call of the function with joint products."""
    counts: list[int] = []
    plain = rotary.norm_rotary

    def counted(streams: list[Stream], eps: float) -> Any:
        joint = [one for one in streams if len(one.weights) == 2]
        assert len(joint) in (0, len(streams)) and all(one.hidden is not None for one in joint)
        counts.extend([len(joint)] if joint else [])
        return plain(streams, eps)

    monkeypatch.setattr(rotary, "norm_rotary", counted)
    return counts


def fused(one: Case) -> Case:
    join_siblings(one.model, one.predict)
    fuse_head_norms(one.model)
    assert fuse_rotary(one.model) > 0
    return one


def unwide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "joined_parts", lambda layers, inputs: None)


@pytest.mark.parametrize("family", LAYERS)
def test_models_compute_what_they_did(family: str, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (fused(each) for each in pair(family))
    for _ in range(2):  # nothing is left over from the first pass
        output, found = one.gradients()
    assert len(taken) == 2 * WIDE[family]
    with torch.no_grad():
        unkept = one.predict()
    assert len(taken) == 3 * WIDE[family]
    unwide(monkeypatch)
    wanted_output, wanted = other.gradients()
    assert len(taken) == 3 * WIDE[family]
    assert relative(output, wanted_output) < ROUNDING and relative(unkept, wanted_output) < ROUNDING
    assert difference(found, wanted) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERS)
def test_compiled_blocks_compute_what_they_did(family: str) -> None:
    """One graph a kind: none depends on a single block's own layers."""
    changes = {"num_layers": 3} if family == "qwen_image" else {"num_layers": 2, "num_single_layers": 3}
    plain, one = pair(family, changes=changes)
    fused(one)
    for each in (plain, one):
        reach(each.model)
    for module in one.model.modules():
        if type(module).__name__ in one.family.blocks:
            module.compile(fullgraph=True, backend="aot_eager")
    before = graphs_compiled()
    for _ in range(2):
        same(one, plain)
    assert graphs_compiled() - before == GRAPHS[family]


@pytest.mark.parametrize("family", LAYERS)
def test_a_disabled_adapter_gives_the_base(family: str, taken: list[int]) -> None:
    plain, one = pair(family)
    fused(one)
    for each in (plain, one):
        each.model.disable_adapters()
    with torch.no_grad():
        assert relative(one.predict(), plain.predict()) < ROUNDING
        assert not taken
        for each in (plain, one):
            each.model.enable_adapters()
        assert relative(one.predict(), plain.predict()) < ROUNDING
    assert len(taken) == WIDE[family]


def test_parted_layers_and_such_without_adapter_are_computed_apart(taken: list[int]) -> None:
    plain, one = pair("flux1_dev")
    part_siblings(fused(one).model)
    same(one, plain)
    plain, one = pair("flux1_dev", adapted=False)
    fused(one)
    with torch.no_grad():
        assert relative(one.predict(), plain.predict()) < ROUNDING
    assert not taken


@pytest.mark.parametrize("parted", ["to_k", "add_k_proj"])
def test_one_stream_of_two_is_computed_apart(parted: str, taken: list[int]) -> None:
    """The product of the other, joined stream is computed only once."""
    plain, one = pair("flux1_dev")
    for each in (plain, one):
        layer = each.model.transformer_blocks[0].attn.get_submodule(parted)
        layer.lora_dropout["default"] = torch.nn.Dropout(0.0)
    same(fused(one), plain)
    assert set(taken) == {1}


@pytest.mark.parametrize("storage", ["int8", "fp8_two_copies"])
def test_quantised_products_are_taken(storage: Any, taken: list[int]) -> None:
    plain, one = (case("flux1_dev", storage=storage) for _ in range(2))
    wanted_output, wanted = plain.gradients()
    output, found = fused(one).gradients()
    assert len(taken) == 3
    # in FP8 gradients share one scale a token
    assert relative(output, wanted_output) < ROUNDING
    assert difference(found, wanted) < (ROUNDING if storage == "int8" else 0.06)


# the product


def layers_of(one: Case, *names: str) -> tuple[Any, ...]:
    attention = one.model.single_transformer_blocks[0].attn
    return tuple(attention.get_submodule(name) for name in names)


def test_the_product_is_that_of_the_layers_beside_each_other() -> None:
    one = case("flux1_dev")
    join_siblings(one.model, one.predict)
    layers, inputs = layers_of(one, "to_q", "to_k", "to_v"), torch.randn(2, 5, 64)
    parts = joined_parts(layers, inputs)
    assert parts is not None and layers[0].shared.pending is None
    wide = torch.cat([layer(inputs) for layer in layers], dim=-1)
    assert parts[0].shape == wide.shape and not torch.equal(parts[0], wide)
    assert torch.equal(parts[0], torch.cat([layer.base_layer(inputs) for layer in layers], dim=-1))
    assert parts[1].shape == (2, 5, sum(up.shape[1] for up in parts[2])) and len(parts[2]) == 3
    assert torch.equal(add_low_rank(parts[0], parts[1], *parts[2]), wide)


@pytest.mark.parametrize("names", [("to_k", "to_q", "to_v"), ("to_q", "to_k"), ("to_q", "to_k", "to_k")])
def test_there_is_none_of_layers_in_another_order(names: tuple[str, ...]) -> None:
    one = case("flux1_dev")
    layers, inputs = layers_of(one, *names), torch.randn(2, 5, 64)
    assert joined_parts(layers, inputs) is None
    join_siblings(one.model, one.predict)
    assert joined_parts(layers, inputs) is None


def test_there_is_none_of_layers_of_two_groups() -> None:
    one = case("flux1_dev")
    join_siblings(one.model, one.predict)
    others = one.model.single_transformer_blocks[1].attn
    query, key, _ = layers_of(one, "to_q", "to_k", "to_v")
    assert joined_parts((query, key, others.to_v), torch.randn(2, 5, 64)) is None


def test_there_is_none_of_layers_that_differ_in_size() -> None:
    """Queries that share a key among several heads have a wider projection than keys and values."""
    one = case("llama")
    assert join_siblings(one.model, one.predict) > 0
    attention = one.model.model.layers[0].self_attn
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    assert layers[2].shared.members == layers
    assert joined_parts(layers, torch.randn(2, 5, 64)) is None


def test_there_is_none_of_a_merged_layer() -> None:
    one = case("flux1_dev")
    join_siblings(one.model, one.predict)
    layers = layers_of(one, "to_q", "to_k", "to_v")
    layers[1].merge()
    assert joined_parts(layers, torch.randn(2, 5, 64)) is None
