"""A low-rank product added to a layer's output, with the gradients of all three."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.saved import kept_bytes
from trainer.modeling.adapter.low_rank import add_low_rank

ROWS, COLUMNS, RANK = 7, 33, 5


def tensors(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """`whole`, `hidden` and `up`."""
    torch.manual_seed(0)
    shapes = ((ROWS, COLUMNS), (ROWS, RANK), (COLUMNS, RANK))
    return [torch.randn(shape, dtype=dtype).requires_grad_(True) for shape in shapes]


def test_the_sum_is_that_of_torch_with_all_three_gradients() -> None:
    found, wanted = tensors(), tensors()
    add_low_rank(*found).sin().sum().backward()
    (wanted[0] + wanted[1] @ wanted[2].t()).sin().sum().backward()
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        plain = wanted[0] + wanted[1] @ wanted[2].t()
        assert torch.allclose(add_low_rank(*found), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_type_stays(dtype: torch.dtype) -> None:
    whole, hidden, up = tensors(dtype)
    output = add_low_rank(whole, hidden, up)
    output.sum().backward()
    assert output.dtype == dtype
    assert [one.grad.dtype for one in (whole, hidden, up)] == [dtype] * 3


def test_derivatives_are_those_of_finite_differences() -> None:
    assert torch.autograd.gradcheck(add_low_rank, tensors())


def test_what_is_added_to_is_not_kept_and_not_changed() -> None:
    whole, hidden, up = tensors()
    before = whole.detach().clone()
    kept = kept_bytes(torch.nn.Module(), lambda: add_low_rank(whole, hidden, up))
    assert kept == (hidden.numel() + up.numel()) * 8
    assert torch.equal(whole.detach(), before)
