"""Rows of several samples, where the kernel reads on the device where samples end; it runs on GPUs only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.modeling.small_models import relative
from trainer.families import language
from trainer.families.protocol import Batch
from trainer.modeling import packed
from trainer.modeling.compiled import compile_blocks, graphs_compiled, varying_sizes

ROWS = ((5, 9, 2), (16,), (1, 1, 20), (7, 8), (40, 3))
KINDS = ("LlamaDecoderLayer",)


@pytest.fixture
def flash_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's part by a mask made of `ends`, where there is no GPU."""

    def by_mask(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        places = torch.arange(query.shape[0])
        sample = (places[:, None] >= ends[1:]).sum(1)
        mask = (sample[:, None] == sample) & (places[:, None] >= places)
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(query, key, value, mask, scale=scale, enable_gqa=True).transpose(0, 1)

    monkeypatch.setattr(packed, "reads_ends", lambda _: True)
    monkeypatch.setattr(packed, "_flash_by_ends", by_mask)


def llama(kernel: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 50}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config)
    packed.set_packed_attention(model, kernel)
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


def test_ends_are_of_one_shape_for_any_number_of_samples() -> None:
    ends = packed.row_ends((5, 9, 2))
    assert (
        ends.dtype == torch.int32 and ends[:4].tolist() == [0, 5, 14, 16] and set(ends[4:].tolist()) == {16}
    )
    shapes = [packed.row_ends([1] * count).shape for count in (1, 63, 64, 65)]
    assert shapes == [(65,), (65,), (65,), (129,)]


def test_a_kernel_that_knows_no_ends_is_given_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = row((5, 9, 2))
    assert packed.segments_of(llama("flash"), batch.text) == (5, 9, 2)  # on a CPU
    monkeypatch.setattr(packed, "reads_ends", lambda _: True)
    assert packed.segments_of(llama("native"), batch.text) == (5, 9, 2)
    assert packed.segments_of(llama("flash"), batch.text) is batch.text["ends"]
    assert packed.segments_for("cudnn", (5, 9), "cuda") == (5, 9)


@pytest.mark.usefixtures("flash_anywhere", "traced")
def test_rows_of_all_divisions_share_the_graphs_and_learn_what_separate_conversations_do() -> None:
    model, plain = llama("flash"), llama("native")
    runs = [
        lambda lengths=lengths: language.hidden_states(model, row(lengths)) for lengths in ((8, 8), (9, 9))
    ]
    compile_blocks(model, KINDS, activation_budget=1.0, varying=varying_sizes(model, KINDS, runs))
    before, counts = graphs_compiled(), []
    for lengths in ROWS:
        gradients = []
        for one in (model, plain):
            one.zero_grad()
            losses = language.losses(one, row(lengths))
            losses.sum().backward()
            gradients.append([losses, *(parameter.grad for parameter in one.parameters())])
        assert max(itertools.starmap(relative, zip(*gradients, strict=True))) < 1e-5
        counts.append(graphs_compiled() - before)
    assert len(set(counts)) == 1
