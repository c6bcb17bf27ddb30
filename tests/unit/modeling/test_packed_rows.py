"""Rows of several samples, whose ends attention reads from a tensor: of any length, and padded to one."""

from __future__ import annotations

import functools
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


CAPACITY = 64


@pytest.fixture
def flash_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends are read also of rows that are not padded, though by a mask."""
    monkeypatch.setattr(packed_rows, "reads_ends", lambda _: True)


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
    read = functools.partial(packed_rows.segments_of, lengths=lengths, ends=ends, padded=False)
    assert read(llama("flash")) == (5, 9, 2)  # on a CPU
    monkeypatch.setattr(packed_rows, "reads_ends", lambda _: True)
    assert read(llama("native")) == (5, 9, 2)
    model = llama("flash")
    assert read(model) is ends
    model.config.attention_dropout = 0.1
    assert read(model) == (5, 9, 2)
    assert packed_rows.segments_for("cudnn", (5, 9), "cuda") == (5, 9)


def test_padding_is_a_sample_of_its_own() -> None:
    """A mask reads it on a CPU whatever the kernel; with dropout it is one more call, if there is any."""
    plain, full = row((5, 9, 2)), language.pad_row(row((60, 4)), CAPACITY)
    padded = language.pad_row(plain, CAPACITY)
    lengths, ends = padded.text["lengths"], padded.text["ends"]
    assert lengths.tolist() == [5, 9, 2, 48] and full.text["lengths"].tolist() == [60, 4, 0]
    assert ends.dtype == torch.int32 and ends.tolist() == [0, 5, 14, 16, *[CAPACITY] * 12]
    for name in ("input_ids", "position_ids", "loss_weight"):
        assert padded.text[name].shape == (1, CAPACITY) and padded.text[name].dtype == plain.text[name].dtype
        assert torch.equal(padded.text[name][:, :16], plain.text[name])
        assert not padded.text[name][:, 16:].any()
    assert (
        (padded.size, padded.weight, padded.tokens) == (plain.size, plain.weight, plain.tokens) == (3, 13, 16)
    )
    model = llama("native")
    assert packed_rows.segments_of(model, lengths, ends, padded=True) is ends
    model.config.attention_dropout = 0.1
    assert packed_rows.segments_of(model, lengths, ends, padded=True) == (5, 9, 2, 48)
    assert packed_rows.segments_of(model, full.text["lengths"], ends, padded=True) == (60, 4)
    with pytest.raises(AssertionError, match="longer"):
        language.pad_row(plain, 15)


@pytest.mark.parametrize(("samples", "ends"), [(1, 16), (15, 16), (16, 32), (31, 32), (32, 64), (70, 128)])
def test_ends_of_padded_rows_are_of_few_sizes(samples: int, ends: int) -> None:
    found = packed_rows.padded_row_ends([2] * samples)
    assert len(found) == ends and found[samples:].tolist() == [2 * samples] * (ends - samples)


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


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("kernel", ["native", "flash"])
def test_padded_rows_of_all_packings_make_one_graph(kernel: str) -> None:
    """Forward and backward; losses and gradients are those of rows that are not padded."""
    model, plain = llama(kernel), llama(kernel)
    compile_blocks(repeated_blocks(model, KINDS), activation_budget=1.0)
    before, seen = graphs_compiled(), set()
    for lengths in (*ROWS, (1, 63), (64,), (3,) * 21):
        batch, unpadded = language.pad_row(row(lengths), CAPACITY), row(lengths)
        loop._mark_lengths(batch)
        seen.add(len(batch.text["ends"]))
        assert differs(model, batch, plain, unpadded) < 1e-5
        assert graphs_compiled() - before == 1
    assert seen == {16, 32}, "ends of more than one size"


def differs(model: Any, batch: Batch, other: Any, its: Batch) -> float:
    """Largest relative difference of a conversation's losses, and of a parameter's gradient."""
    gradients = []
    for one, read in ((model, batch), (other, its)):
        one.zero_grad()
        losses = language.losses(one, read)
        losses.sum().backward()
        gradients.append([losses, *(parameter.grad for parameter in one.parameters())])
    return max(itertools.starmap(relative, zip(*gradients, strict=True)))


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
        assert differs(model, batch, plain, batch) < 1e-5
        counts.append(graphs_compiled() - before)
    assert len(set(counts)) == 1
