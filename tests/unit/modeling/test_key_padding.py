"""Padding that attention leaves out: against a softmax over the real keys alone, in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.modeling.attention.key_padding import attend_without_padding
from trainer.modeling.attention.text_lengths import pad_text
from trainer.planning.shapes.mix import TEXT_LENGTHS, padded_length

Tensors = tuple[torch.Tensor, ...]
# of fp32 with scores of 100, relative to the largest value
ROUNDING = 1e-4


def exact(tensors: Tensors, gradient: torch.Tensor, mask: torch.Tensor) -> Tensors:
    """Result and gradients, by the definition."""
    query, key, value = (one.double().requires_grad_() for one in tensors)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~mask[:, None, None], -math.inf).softmax(-1)
    output = torch.einsum("bhqk,bkhd->bqhd", weights, value)
    return output.detach(), *torch.autograd.grad(output, (query, key, value), gradient.double())


def found(tensors: Tensors, gradient: torch.Tensor, mask: torch.Tensor, kernel: str) -> Tensors:
    query, key, value = (one.clone().requires_grad_() for one in tensors)
    output = attend_without_padding(query, key, value, mask, kernel)
    return output.detach(), *torch.autograd.grad(output, (query, key, value), gradient)


# a shift of 100 puts every real score far below that of a key of zeros
@pytest.mark.parametrize("shift", [0.0, 20.0, 100.0])
@pytest.mark.parametrize("kernel", ["flash", "native"])
def test_attention_is_that_over_the_real_keys(kernel: str, shift: float) -> None:
    torch.manual_seed(0)
    query, key, value, gradient = (torch.randn(4, 48, 2, 16) for _ in range(4))
    query[..., 0] += 4
    key[..., 0] -= shift
    # one real key, all, some; and some with padding between the text and the other stream
    mask = torch.arange(48)[None] < torch.tensor([[1], [48], [17], [9]])
    mask[3, 30:] = True
    wanted = exact((query, key, value), gradient, mask)
    for one, right in zip(found((query, key, value), gradient, mask, kernel), wanted, strict=True):
        assert (one - right).abs().max() <= ROUNDING * right.abs().max()


@pytest.mark.parametrize("kernel", ["flash", "native"])
def test_padding_has_no_gradient_and_no_effect(kernel: str) -> None:
    torch.manual_seed(0)
    tensors = tuple(torch.randn(1, 24, 2, 16) for _ in range(3))
    gradient, mask = torch.randn(1, 24, 2, 16), torch.arange(24)[None] < 10
    output, _, *gradients = found(tensors, gradient, mask, kernel)
    for one in gradients:
        assert one[:, 10:].count_nonzero() == 0 and one[:, :10].count_nonzero() > 0
    others = tuple(torch.where(mask[..., None, None], one, 7.0) for one in tensors[1:])
    again, *_ = found((tensors[0], *others), gradient, mask, kernel)
    assert torch.equal(output, again)


def test_captions_become_few_lengths_and_lose_nothing() -> None:
    lengths = {tokens: padded_length(tokens) for tokens in range(1, 3000)}
    assert all(length >= tokens for tokens, length in lengths.items())
    assert len({lengths[tokens] for tokens in range(1, 301)}) == 4
    assert {lengths[tokens] for tokens in TEXT_LENGTHS} == set(TEXT_LENGTHS)
    caption = torch.randn(70, 8)
    padded, mask = pad_text(caption, padded_length(70))
    assert padded.shape == (128, 8) and mask.sum() == 70
    assert torch.equal(padded[mask], caption) and padded[~mask].count_nonzero() == 0
