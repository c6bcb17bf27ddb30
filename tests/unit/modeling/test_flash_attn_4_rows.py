"""flash-attn 4 over rows: the operators around its functions, which plain torch stands in for here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from trainer.modeling.attention import packed_rows
from trainer.modeling.attention.flash_attn_4_rows import attend_by_ends

LENGTHS = (5, 1, 9)


def parts_of(tensors: list[torch.Tensor], ends: torch.Tensor) -> list[list[torch.Tensor]]:
    """The tensors of each sample that has tokens."""
    pairs = [(a, b) for a, b in zip(ends.tolist(), ends[1:].tolist(), strict=False) if b > a]
    return [[one[a:b] for one in tensors] for a, b in pairs]


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """One sample's causal attention, tensors (tokens, heads, width)."""
    heads = [one.transpose(0, 1)[None] for one in (query, key, value)]
    return scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(
        0, 1
    )


def changes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor, scale: float
) -> tuple[torch.Tensor, ...]:
    """Gradients of `attended`, by hand: inside an operator nothing is recorded for autograd."""
    groups, tokens = query.shape[1] // key.shape[1], len(query)
    queries, upstream = query.transpose(0, 1), gradient.transpose(0, 1)
    keys, values = (one.transpose(0, 1).repeat_interleave(groups, 0) for one in (key, value))
    later = torch.ones(tokens, tokens).triu(1).bool()
    weights = (queries @ keys.mT * scale).masked_fill(later, -torch.inf).softmax(-1)
    means = (upstream * (weights @ values)).sum(-1, keepdim=True)
    change = weights * (upstream @ values.mT - means) * scale
    shared = (change.mT @ queries, weights.mT @ upstream)
    of_keys = (one.unflatten(0, (-1, groups)).sum(1).transpose(0, 1) for one in shared)
    return (change @ keys).transpose(0, 1), *of_keys


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options that the package's functions were given."""
    named: list[dict[str, Any]] = []

    def forward(query: Any, key: Any, value: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        named.append(options | {"width": query.shape[-1]})
        assert options["causal"] and options["cu_seqlens_q"] is options["cu_seqlens_k"]
        parts = parts_of([query, key, value], options["cu_seqlens_q"])
        output = torch.cat([attended(*part, options["softmax_scale"]) for part in parts])
        return output, torch.zeros(query.shape[1], len(query)), None

    def backward(
        query: Any, key: Any, value: Any, output: Any, gradient: Any, sums: Any, **options: Any
    ) -> tuple[torch.Tensor, ...]:
        named.append(options | {"width": query.shape[-1]})
        assert sums.shape == (query.shape[1], len(query)) and gradient.is_contiguous()
        parts = parts_of([query, key, value, gradient], options["cu_seqlens_q"])
        return tuple(
            map(torch.cat, zip(*(changes(*part, options["softmax_scale"]) for part in parts), strict=True))
        )

    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return named


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    return [torch.randn(tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_row_is_its_samples_one_by_one(
    given: list[dict[str, Any]], scale: float | None, padded: bool
) -> None:
    ends = packed_rows.padded_row_ends(LENGTHS) if padded else packed_rows.row_ends(LENGTHS)
    query, key, value = tensors()
    found = packed_rows._flash_4_by_ends(query, key, value, ends, scale)
    wanted = torch.cat(
        [attended(*part, 8**-0.5 if scale is None else scale) for part in parts_of([query, key, value], ends)]
    )
    upstream = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(
        torch.autograd.grad(found, (query, key, value), upstream),
        torch.autograd.grad(wanted, (query, key, value), upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    assert [one["max_seqlen_q"] for one in given] == [15] * len(given)
    assert {one["width"] for one in given} == {64}


@pytest.mark.usefixtures("given")
def test_compilers_are_told_its_shapes_and_its_work() -> None:
    """Without a gradient of its sums, which nothing reads."""
    query, key, value = tensors()
    ends = packed_rows.row_ends(LENGTHS)
    inputs = [one.detach() for one in (query, key, value)]
    output, sums = attend_by_ends(*inputs, ends, 0.3)
    saved = (torch.ones_like(output), *inputs, ends, output, sums)
    operators, checks = torch.ops.trainer, ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.flash_attn_4_rows, (*inputs, ends, 0.3), test_utils=checks)
    torch.library.opcheck(operators.flash_attn_4_rows_backward, (*saved, 0.3), test_utils=checks)
    with FlopCounterMode(display=False) as counted:
        attend_by_ends(query, key, value, ends, 0.3)
    assert counted.get_total_flops() == 2 * 2 * (4 * 15 * 15 * 8)


@pytest.mark.usefixtures("given")
def test_it_is_one_graph_of_any_number_of_tokens_and_samples() -> None:
    def block(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        return packed_rows._flash_4_by_ends(query.tanh(), key, value, ends, None).sin()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in (LENGTHS, (7, 7), (1, 2, 3, 4)):
        inputs = [torch.randn(sum(lengths), heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        ends = packed_rows.row_ends(lengths)
        found, wanted = (one(*inputs, ends) for one in (compiled, block))
        torch.testing.assert_close(found, wanted)
        for one, other in zip(
            torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs), strict=True
        ):
            torch.testing.assert_close(one, other)
