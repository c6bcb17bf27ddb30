"""Compiled blocks of a language model over rows that are divided differently: one graph, right gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.families import language
from trainer.families.llama import LLAMA
from trainer.families.values import ENDS, Batch
from trainer.modeling.attention.packed_rows import set_packed_attention
from trainer.modeling.blocks.compiled import compile_blocks, graphs_compiled, mark_varying, varying_sizes
from trainer.modeling.blocks.recompute import repeated_blocks

pytestmark = pytest.mark.gpu

DIVISIONS = ((320, 448), (1, 700), (64,), (17, 3, 250, 129), (512, 512), (333,), tuple(range(1, 40)))
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def build(dtype: torch.dtype, kernel: str) -> Any:
    torch.manual_seed(0)
    made: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = made.to("cuda", dtype).train()
    set_packed_attention(model, kernel)
    return model


def row(lengths: Sequence[int]) -> Batch:
    """All tokens but the first of each conversation are learned."""
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
    text = {name: one if name == "lengths" else one.cuda() for name, one in made.text.items()}
    return Batch(latents={}, text=text, size=made.size, weight=made.weight, tokens=made.tokens)


def gradients(model: Any, batch: Batch) -> torch.Tensor:
    model.zero_grad()
    loss: Any = LLAMA.loss(model, batch, None, None).sum() / batch.weight
    loss.backward()
    return torch.cat([one.grad.flatten().float() for one in model.parameters() if one.grad is not None])


@pytest.mark.parametrize("kernel", ["flash", "cudnn_strided", "efficient"])
def test_rows_agree_with_fp32(kernel: str) -> None:
    wanted, model = build(torch.float32, "math"), build(torch.bfloat16, kernel)
    for lengths in DIVISIONS:
        right = gradients(wanted, row(lengths))
        assert (gradients(model, row(lengths)) - right).norm() / right.norm() < 0.03, lengths


@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_one_graph_serves_all_divisions(budget: float) -> None:
    wanted, model = build(torch.float32, "math"), build(torch.bfloat16, "flash")

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
