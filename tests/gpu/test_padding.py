"""Padding that attention leaves out by a GPU's kernels: against a softmax over the real keys in fp64."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import pytest
import torch

from trainer.modeling.attention.kernels import attention, selected
from trainer.modeling.attention.key_padding import attend_without_padding

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
HEADS, WIDTH = 24, 128
KERNELS = ["cudnn", "cudnn_strided", "flash", "efficient", "flash_attn_4"]
Attend = Callable[..., torch.Tensor]


def exact(tensors: list[torch.Tensor], gradient: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients of the first two heads, by the definition."""
    query, key, value = (one[:, :, :2].double().requires_grad_() for one in tensors)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(WIDTH)
    weights = scores.masked_fill(~mask[:, None, None], -math.inf).softmax(-1)
    output = torch.einsum("bhqk,bkhd->bqhd", weights, value)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), gradient[:, :, :2].double())]


def run(attend: Attend, tensors: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    leaves = [one.detach().requires_grad_() for one in tensors]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found[:, :, :2].double() - wanted).norm() / wanted.norm()).item())


def skip_if_missing(kernel: str) -> None:
    if kernel == "flash_attn_4" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn 4 is not installed")


@pytest.mark.parametrize("shift", [0.0, 16.0, 60.0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_is_left_out_as_exactly_as_no_padding_is_read(kernel: str, shift: float) -> None:
    """Joint attention: the text's tokens first, 53 of 128 in one sample and 3 in the other."""
    skip_if_missing(kernel)
    torch.manual_seed(0)
    padded, image = 128, 1024
    tensors = [
        torch.randn(2, padded + image, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)
    ]
    *tensors, gradient = tensors
    tensors[0][..., 0] += 4
    tensors[1][..., 0] -= shift
    mask = torch.ones(2, padded + image, dtype=torch.bool, device=DEVICE)
    mask[0, 53:padded], mask[1, 3:padded] = False, False
    gradient = gradient * mask[..., None, None]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with selected(kernel):
            return attend_without_padding(query, key, value, mask, kernel)

    wanted, found = exact(tensors, gradient, mask), run(attend, tensors, gradient)
    compiled = run(torch.compile(attend, fullgraph=True), tensors, gradient)
    for sample, real in enumerate(mask):
        alone = [one[sample : sample + 1, real] for one in (*tensors, gradient)]
        sliced = run(lambda *one: attention(*one, kernel), alone[:3], alone[3])
        for name, one, made, cut, right in zip("oqkv", found, compiled, sliced, wanted, strict=True):
            own = right[sample : sample + 1, real]
            near = relative(cut, own)
            for which, result in (("eager", one), ("compiled", made)):
                error = relative(result[sample : sample + 1, real], own)
                assert error <= 1.5 * near + 2e-3, (which, name, error, near)
    assert all(one.isfinite().all() for one in (*found, *compiled))


@pytest.mark.parametrize("kernel", ["cudnn", "cudnn_strided", "flash"])
def test_few_real_keys(kernel: str) -> None:
    """Attention over a caption of one token, or five, that is padded to 64."""
    torch.manual_seed(0)
    query, key, value, gradient = (
        torch.randn(2, tokens, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        for tokens in (1024, 64, 64, 1024)
    )
    key[..., 0] -= 40
    mask = torch.arange(64, device=DEVICE)[None] < torch.tensor([[1], [5]], device=DEVICE)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend_without_padding(query, key, value, mask, kernel)

    found = run(attend, [query, key, value], gradient)
    wanted = exact([query, key, value], gradient, mask)
    assert relative(found[0], wanted[0]) < 6e-3
    for one, right in zip(found[2:], wanted[2:], strict=True):  # of one key the queries have no gradient
        assert float((one[:, :, :2].double() - right).norm() / wanted[3].norm()) < 6e-3
    assert relative(found[1][1:], wanted[1][1:]) < 2e-2
