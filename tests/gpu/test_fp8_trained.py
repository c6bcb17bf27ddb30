"""Trained layers in FP8 on a GPU: tensor cores compute what a CPU emulates, also in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trainer.modeling.storage.fp8_gradient import QuantizedGradient, quantize_gradient
from trainer.modeling.storage.fp8_product import LEAST, MOST, padded_rows, quantize_rows, unpack_rows
from trainer.modeling.storage.fp8_trained import Fp8TrainedLinear, WeightGradient, refresh_weights
from trainer.modeling.storage.joined_trained import Joined, join_trained

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


# kernels


def given(rows: int, out: int, scale: float = 1e-4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A gradient whose rows and columns differ in size, a scale a column, and one a row, with padding."""
    generator = torch.Generator("cuda").manual_seed(rows + out)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device="cuda")

    gradient = scale * torch.randn(rows, out, generator=generator, device="cuda")
    gradient *= torch.logspace(-3, 1, rows, device="cuda")[:, None]
    gradient *= torch.logspace(1, -2, out, device="cuda")
    row_scale = torch.ones(padded_rows(rows), 1, device="cuda")
    row_scale[:rows] = drawn(rows, 1) + 1e-3
    return gradient.bfloat16(), drawn(out) + 1e-4, row_scale


def bits(values: torch.Tensor) -> torch.Tensor:
    """Bytes of e4m3 in which zeros have no sign."""
    whole = values.view(torch.uint8)
    return torch.where(whole == 128, 0, whole)


def in_fp32(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as bytes with their scales, by plain torch.

    Divisors are tensors: it would multiply by the inverse of a number.
    """
    largest = wide.abs().amax(1, keepdim=True).clamp(min=LEAST)
    scale = largest / torch.full_like(largest, MOST)
    return bits((wide * (torch.ones_like(scale) / scale)).to(torch.float8_e4m3fn)), scale


SHAPES = [(1, 16), (2, 28672), (64, 128), (77, 144), (300, 48), (513, 3072), (4096, 6144), (4608, 12288)]


@pytest.mark.parametrize(("rows", "out"), SHAPES)
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-4])
def test_a_gradient_is_quantised_both_ways_as_plain_torch_does_it(rows: int, out: int, scale: float) -> None:
    gradient, across, down = given(rows, out, scale)
    found = quantize_gradient(gradient, across, down, with_sums=True)
    by_rows, own = in_fp32(gradient.float() * across)
    assert torch.equal(found.scale[:rows], own)
    assert torch.equal(bits(found.values)[:rows], by_rows)
    by_columns, own = in_fp32((gradient.float() * down[:rows]).t().contiguous())
    assert torch.equal(found.turned_scale, own)
    assert torch.equal(bits(found.turned)[:, :rows], by_columns)
    # padding
    assert len(found.values) == len(found.scale) == found.turned.shape[1] == padded_rows(rows)
    assert not bits(found.values)[rows:].any() and not bits(found.turned)[:, rows:].any()
    assert (found.scale[rows:] == 1).all()
    exact, size = gradient.double().sum(0), gradient.double().abs().sum(0)
    assert ((found.sums - exact).abs() <= 1e-5 * size).all()


def test_a_gradient_is_quantised_alike_each_time_and_in_parts() -> None:
    gradient, across, down = given(1000, 3072)
    first = quantize_gradient(gradient, across, down, with_sums=True)
    for _ in range(5):
        again = quantize_gradient(gradient, across, down, with_sums=True)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    alone = quantize_gradient(gradient, None, down, with_sums=False)
    assert torch.equal(alone.turned.view(torch.uint8), first.turned.view(torch.uint8))
    assert torch.equal(alone.turned_scale, first.turned_scale)
    assert not alone.values.numel() and not alone.scale.numel() and not alone.sums.numel()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (5, 9), (299, 143)])
def test_a_gradient_that_is_not_finite_is_seen(bad: float, place: tuple[int, int]) -> None:
    gradient, across, down = given(300, 144)
    gradient[place] = bad
    found: QuantizedGradient = quantize_gradient(gradient, across, down, with_sums=True)
    by_rows = (found.values.float() * found.scale)[:300].isnan()
    by_columns = (found.turned.float() * found.turned_scale)[:, :300].isnan()
    for seen, line in ((by_rows, place[0]), (by_columns, place[1])):
        assert seen[line].all()
        seen[line] = False
        assert not seen.any()
    assert found.sums.isfinite().logical_not().sum() == 1


@pytest.mark.parametrize("way", ["fp8", "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_without_a_gradient(way: WeightGradient, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(77, IN, generator=generator).bfloat16()
    gradient = (1e-5 * torch.randn(77, OUT, generator=generator)).bfloat16()
    found = []
    for device in ("cuda", "cpu"):
        one = layer(way, device)
        call = torch.compile(one, fullgraph=True) if compiled and device == "cuda" else one
        call(inputs.to(device)).backward(gradient.to(device))
        found.append([each.grad.float().cpu() for each in one.parameters() if each.grad is not None])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize("copies", [1, 2])
def test_refreshing_takes_no_memory_and_follows_the_weight(copies: int) -> None:
    one = layer("fp8", "cuda", copies)
    assert one.values is not None and one.scale is not None
    places = [each.data_ptr() for each in one.buffers()]
    with torch.no_grad():
        one.weight.mul_(torch.randn_like(one.weight))
    wanted, scale = quantize_rows(one.weight)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one.refresh()
    assert torch.cuda.max_memory_allocated() == before
    assert [each.data_ptr() for each in one.buffers()] == places
    assert torch.equal(one.values.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(one.scale, scale)
    assert (one.transposed is None) == (copies == 1)
    if one.transposed is not None:
        assert torch.equal(one.transposed.view(torch.uint8), wanted.view(torch.uint8).t())


def test_kept_inputs_are_unpacked_as_plain_torch_does_it() -> None:
    values, scale = quantize_rows(torch.randn(77, 3072, device="cuda").bfloat16(), pad=True)
    found = unpack_rows(values[:77], scale[:77], torch.bfloat16)
    assert torch.equal(found, (values[:77].float() * scale[:77]).bfloat16())


# layers of one input


class Projections(torch.nn.Module):
    """Query, key and value of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(IN, out, dtype=torch.bfloat16) for out in (256, 64, 64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(inputs), self.k(inputs), self.v(inputs)], dim=-1)


def projections(way: WeightGradient | None, device: str, *, joins: bool) -> torch.nn.Sequential:
    """They in a block, in FP8 with gradients of weights in `way`, or in bf16."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Projections()).to(device)
    if way is not None:
        for name in ("0.q", "0.k", "0.v"):
            linear: Any = model.get_submodule(name)
            model.set_submodule(name, Fp8TrainedLinear(linear, weight_gradient=way))
    if joins:
        found = join_trained(model, [["0.q", "0.k", "0.v"]], {"0": model[0]})
        assert found == Joined(layers=3, groups=1)
    refresh_weights(model)
    return model


@pytest.mark.parametrize("way", ["fp8", "bf16", None])
@pytest.mark.parametrize("tokens", [77, 512])
@pytest.mark.parametrize("compiled", [False, True])
def test_joined_layers_compute_what_separate_ones_do(
    way: WeightGradient | None, tokens: int, compiled: bool
) -> None:
    joined, apart = (projections(way, "cuda", joins=joins) for joins in (True, False))
    found = passes(torch.compile(joined, fullgraph=True) if compiled else joined, joined, tokens, "cuda")
    wanted = passes(apart, apart, tokens, "cuda")
    assert len(found) == len(wanted) == 2 + 6
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        # the gradient of the inputs is summed in another type, and quantised with one scale for all
        bound = 5e-2 if number == 1 and way is not None else 1e-2
        assert (ours - theirs).norm() / theirs.norm() < bound
    gradients = [layer.weight.grad for layer in (joined[0].q, joined[0].k, joined[0].v)]
    assert len({one.untyped_storage().data_ptr() for one in gradients}) == 1
