"""Rows of conversations that are divided differently, padded and not: one graph, right gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.families import language
from trainer.families.llama import LLAMA
from trainer.families.values import ENDS, Batch
from trainer.modeling.attention.packed_rows import packed_attention, padded_row_ends, set_packed_attention
from trainer.modeling.blocks.compiled import compile_blocks, graphs_compiled, mark_varying, varying_sizes
from trainer.modeling.blocks.recompute import repeated_blocks
from trainer.ways.kernels import KERNELS

pytestmark = pytest.mark.gpu

DIVISIONS = ((320, 448), (1, 700), (64,), (17, 3, 250, 129), (512, 512), (333,), tuple(range(1, 40)))
CAPACITY = 1088
"""Tokens that rows are padded to."""
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


BY_ENDS = [name for name, kernel in KERNELS.items() if kernel.reads_ends]


def require(kernel: str) -> None:
    if (module := KERNELS[kernel].module) and importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{KERNELS[kernel].package} is not installed")


def build(dtype: torch.dtype, kernel: str) -> Any:
    torch.manual_seed(0)
    made: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = made.to("cuda", dtype).train()
    set_packed_attention(model, kernel)
    return model


def row(lengths: Sequence[int], padded: int = 0) -> Batch:
    """All tokens but the first of each conversation are learned; `padded` to so many tokens unless 0."""
    chooser = torch.Generator().manual_seed(sum(lengths))
    made = language.pack(
        [
            {
                "input_ids": torch.randint(0, 512, (length,), generator=chooser),
                "loss_weight": torch.tensor([0.0] + [1.0] * (length - 1)),
            }
            for length in lengths
        ]
    )
    if padded:
        assert LLAMA.pad_row is not None
        made = LLAMA.pad_row(made, padded)
    text = {name: one if name == "lengths" else one.cuda() for name, one in made.text.items()}
    return Batch(latents={}, text=text, size=made.size, weight=made.weight, tokens=made.tokens)


def gradients(model: Any, batch: Batch) -> torch.Tensor:
    model.zero_grad()
    loss: Any = LLAMA.loss(model, batch, None, None).sum() / batch.weight
    loss.backward()
    return torch.cat([one.grad.flatten().float() for one in model.parameters() if one.grad is not None])


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    return LLAMA.loss(model, batch, None, None).detach().sum() / batch.weight


@pytest.mark.parametrize("padded", [0, CAPACITY])
@pytest.mark.parametrize("kernel", [*BY_ENDS, "cudnn_strided", "efficient"])
def test_rows_agree_with_fp32(kernel: str, padded: int) -> None:
    require(kernel)
    wanted, model = build(torch.float32, "math"), build(torch.bfloat16, kernel)
    for lengths in DIVISIONS:
        right = gradients(wanted, row(lengths))
        assert (gradients(model, row(lengths, padded)) - right).norm() / right.norm() < 0.03, lengths


@pytest.mark.parametrize("kernel", BY_ENDS)
@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("lengths", [(320, 448), (17, 3, 250, 129), (CAPACITY,), (1,) * 40])
def test_attention_by_ends_is_that_of_each_conversation_in_fp32(
    lengths: tuple[int, ...], width: int, kernel: str
) -> None:
    """Padding is one more conversation, and ends after it are of conversations without tokens: no value
    there may be what the memory held before.
    """
    require(kernel)
    torch.manual_seed(0)
    whole = (*lengths, CAPACITY - sum(lengths))
    query, key, value, upstream = (
        torch.randn(1, heads, CAPACITY, width, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2, 8)
    )
    inputs = [one.requires_grad_() for one in (query, key, value)]
    ends = padded_row_ends(whole).cuda()
    assert len(ends) > len(whole) + 1
    found = packed_attention(query, key, value, kernel, segments=ends)
    found.backward(upstream.transpose(1, 2))
    exact = [one.detach().float().requires_grad_() for one in inputs]
    parts = (one.split([length for length in whole if length], dim=2) for one in exact)
    wanted = torch.cat(
        [
            scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
            for part in zip(*parts, strict=True)
        ],
        dim=2,
    )
    wanted.backward(upstream.float())
    pairs = [(found, wanted.transpose(1, 2)), *((a.grad, b.grad) for a, b in zip(inputs, exact, strict=True))]
    for one, other in pairs:
        assert one is not None and other is not None and bool(one.isfinite().all())
        assert (one.float() - other).norm() / other.norm() < 0.02


@pytest.mark.parametrize("kernel", BY_ENDS)
@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_one_graph_serves_all_packings_of_a_padded_row(budget: float, kernel: str) -> None:
    """Compiled by inductor; losses are those of eager blocks, gradients those in fp32."""
    require(kernel)
    wanted, model = build(torch.float32, "math"), build(torch.bfloat16, kernel)
    eagerly = build(torch.bfloat16, "flash")
    compile_blocks(repeated_blocks(model, LLAMA.blocks), activation_budget=budget)
    before = graphs_compiled()
    for lengths in DIVISIONS:
        batch = row(lengths, CAPACITY)
        mark_varying(batch.text[ENDS], [0])
        assert loss_of(model, batch).item() == pytest.approx(loss_of(eagerly, row(lengths)).item(), rel=5e-3)
        right = gradients(wanted, row(lengths))
        assert (gradients(model, batch) - right).norm() / right.norm() < 0.03, lengths
        assert graphs_compiled() - before == 1, lengths


@pytest.mark.parametrize("kernel", BY_ENDS)
@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_one_graph_serves_all_divisions(budget: float, kernel: str) -> None:
    require(kernel)
    wanted, model = build(torch.float32, "math"), build(torch.bfloat16, kernel)

    def forward(lengths: Sequence[int]) -> None:
        with torch.no_grad():
            LLAMA.predict(model, row(lengths), None, None)

    runs = [lambda one=one: forward(one) for one in ((128,), (256,))]
    varying = varying_sizes(repeated_blocks(model, LLAMA.blocks), runs)
    compile_blocks(repeated_blocks(model, LLAMA.blocks), activation_budget=budget, varying=varying)
    before = graphs_compiled()
    for lengths in DIVISIONS:
        batch = row(lengths)
        mark_varying(batch.text[ENDS], [0])
        right = gradients(wanted, batch)
        assert (gradients(model, batch) - right).norm() / right.norm() < 0.03, lengths
    assert graphs_compiled() - before <= 2
