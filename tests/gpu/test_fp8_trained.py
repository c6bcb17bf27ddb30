"""Trained layers in FP8 on a GPU: tensor cores compute what a CPU emulates, also in compiled code."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trainer.modeling.storage.fp8_trained import Fp8TrainedLinear, WeightGradient

pytestmark = pytest.mark.gpu
OUT, IN = 384, 256


def layer(way: WeightGradient, device: str, copies: int = 2) -> Fp8TrainedLinear:
    torch.manual_seed(0)
    plain = torch.nn.Linear(IN, OUT, dtype=torch.bfloat16)
    one = Fp8TrainedLinear(plain.to(device), copies=copies, weight_gradient=way)
    one.refresh()
    return one


def passes(call: torch.nn.Module, module: torch.nn.Module, tokens: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(tokens, IN, generator=generator).bfloat16().to(device).requires_grad_()
    gradient = (1e-5 * torch.randn(tokens, OUT, generator=generator)).bfloat16().to(device)
    module.zero_grad()
    output = call(inputs)
    output.backward(gradient)
    assert inputs.grad is not None
    of_parameters = [one.grad for one in module.parameters() if one.grad is not None]
    return [one.detach().float().cpu() for one in (output, inputs.grad, *of_parameters)]


@pytest.mark.parametrize("way", ["fp8", "bf16"])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("tokens", [1, 77, 512])  # none, some and all of a product's rows are padding
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gpu_computes_what_the_cpu_emulates(
    way: WeightGradient, copies: int, tokens: int, compiled: bool
) -> None:
    one = layer(way, "cuda", copies)
    found = passes(torch.compile(one) if compiled else one, one, tokens, "cuda")
    other = layer(way, "cpu", copies)
    wanted = passes(other, other, tokens, "cpu")
    assert len(found) == len(wanted) == 4
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize(("way", "products"), [("fp8", 3), ("bf16", 2)])
def test_the_products_are_fp8(way: WeightGradient, products: int) -> None:
    one = layer(way, "cuda")
    passes(one, one, 512, "cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        passes(one, one, 512, "cuda")
    counts = {row.key: row.count for row in seen.key_averages()}
    assert counts["aten::_scaled_mm"] == products
