"""Rows of several samples, where the kernel reads on the device where samples end; it runs on GPUs only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.modeling.small_models import relative
from trainer.engine.training import loop
from trainer.families import language
from trainer.families.values import Batch
from trainer.modeling.attention import packed_rows
from trainer.modeling.blocks.compiled import compile_blocks, graphs_compiled, varying_sizes
from trainer.modeling.blocks.recompute import repeated_blocks

ROWS = ((5, 9, 2), (16,), (1, 1, 20), (7, 8), (40, 3))
KINDS = ("LlamaDecoderLayer",)


@pytest.fixture
def flash_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's part by a mask made of `ends`, where there is no GPU."""

    def by_mask(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        places = torch.arange(query.shape[0])
        sample = torch.bucketize(places, ends, right=True)
        mask = (sample[:, None] == sample) & (places[:, None] >= places)
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(query, key, value, mask, scale=scale, enable_gqa=True).transpose(0, 1)

    monkeypatch.setattr(packed_rows, "reads_ends", lambda _: True)
    monkeypatch.setattr(packed_rows, "_flash_by_ends", by_mask)


def llama(kernel: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 50}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config)
    packed_rows.set_packed_attention(model, kernel)
    return model


def row(lengths: Sequence[int]) -> Batch:
    drawn = torch.Generator().manual_seed(sum(lengths))
    return language.pack(
        [
            {
                "input_ids": torch.randint(50, (length,), generator=drawn),
                "loss_weight": (torch.arange(length) > 0).float(),
            }
            for length in lengths
        ]
    )


def test_ends_begin_at_nothing_and_end_with_the_row() -> None:
    ends = packed_rows.row_ends((5, 9, 2))
    assert ends.dtype == torch.int32 and ends.tolist() == [0, 5, 14, 16]


def test_a_kernel_that_knows_no_ends_is_given_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, ends = (row((5, 9, 2)).text[name] for name in ("lengths", "ends"))
    assert packed_rows.segments_of(llama("flash"), lengths, ends) == (5, 9, 2)  # on a CPU
    monkeypatch.setattr(packed_rows, "reads_ends", lambda _: True)
    assert packed_rows.segments_of(llama("native"), lengths, ends) == (5, 9, 2)
    model = llama("flash")
    assert packed_rows.segments_of(model, lengths, ends) is ends
    model.config.attention_dropout = 0.1
    assert packed_rows.segments_of(model, lengths, ends) == (5, 9, 2)
    assert packed_rows.segments_for("cudnn", (5, 9), "cuda") == (5, 9)


def test_the_operator_is_given_whole_vectors_and_its_work_is_counted_once_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A width of 20, which the kernel takes as 24: what is added changes nothing and does not come back."""
    given: list[Any] = []

    def operator(query: Any, key: Any, value: Any, *_: Any, scale: float) -> tuple[torch.Tensor, int]:
        given.append((query.shape[-1], scale))
        weights = (torch.einsum("thw,shw->hts", query, key) * scale).softmax(-1)
        return torch.einsum("hts,shw->thw", weights, value), 0

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    query, key, value = (torch.randn(6, 2, 20) for _ in range(3))
    found = packed_rows._flash_by_ends(query, key, value, packed_rows.row_ends((6,)), None)
    by_heads = (one.transpose(0, 1) for one in (query, key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(*by_heads).transpose(0, 1)
    assert relative(found, wanted) < 1e-6 and given == [(24, 20**-0.5)]
    # four query heads share two key heads
    counted = packed_rows._operations(torch.empty(6, 4, 20), torch.empty(6, 2, 20), torch.empty(6, 2, 20))
    assert counted == 2 * 4 * 6 * 6 * 40


@pytest.mark.usefixtures("flash_anywhere", "traced")
def test_rows_of_all_divisions_share_the_graphs_and_learn_what_separate_conversations_do() -> None:
    model, plain = llama("flash"), llama("native")
    runs = [
        lambda lengths=lengths: language.hidden_states(model, row(lengths)) for lengths in ((8, 8), (9, 9))
    ]
    compile_blocks(
        repeated_blocks(model, KINDS),
        activation_budget=1.0,
        varying=varying_sizes(repeated_blocks(model, KINDS), runs),
    )
    before, counts = graphs_compiled(), []
    for lengths in (*ROWS, (3,) * 70):
        batch = row(lengths)
        loop._mark_lengths(batch)
        gradients = []
        for one in (model, plain):
            one.zero_grad()
            losses = language.losses(one, batch)
            losses.sum().backward()
            gradients.append([losses, *(parameter.grad for parameter in one.parameters())])
        assert max(itertools.starmap(relative, zip(*gradients, strict=True))) < 1e-5
        counts.append(graphs_compiled() - before)
    assert len(set(counts)) == 1
