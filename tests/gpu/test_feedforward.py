"""Fused feed-forwards on a GPU: kernels against the CPU's arithmetic, modules against their layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.fast_models import DEVICE, SETTINGS, build, inputs, trainable
from tests.quantized_layers import from_linear
from tests.unit.modeling.small_models import difference, relative
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.modeling.blocks.compiled import compile_blocks
from trainer.modeling.blocks.recompute import repeated_blocks
from trainer.modeling.fused.feedforward import (
    fp8_feed_forward,
    fuse_feed_forwards,
    gelu_backward_quantize_rows,
    gelu_quantize_rows,
)
from trainer.modeling.storage.row_scaled import RowScaledLinear

pytestmark = pytest.mark.gpu

# (columns beside, columns of GELU): one program holds all but the last
WIDTHS = [(0, 64), (16, 48), (0, 12288), (3072, 12288), (3072, 18432)]
DTYPES = [torch.bfloat16, torch.float32]
Quantized = tuple[torch.Tensor, torch.Tensor]


def rows(columns: int, dtype: torch.dtype, count: int = 37) -> torch.Tensor:
    """A part of wider rows, whose sizes differ; one is zeros."""
    wide = torch.randn(count, columns + 24) * torch.logspace(-3, 1.3, count)[:, None]
    wide[3] = 0
    return wide.to(dtype)[:, 8 : 8 + columns]


def on_device(wide: torch.Tensor | None) -> torch.Tensor | None:
    """With the same strides."""
    if wide is None:
        return None
    copy = torch.empty_strided(wide.shape, wide.stride(), dtype=wide.dtype, device=DEVICE)
    return copy.copy_(wide)


def agree(found: Quantized, wanted: Quantized, dtype: torch.dtype) -> None:
    count = len(wanted[1])
    scale, wanted_scale = found[1].cpu()[:count], wanted[1]
    # a value of bf16 may fall to the other side, with it the scale of its row
    limit = 1e-5 if dtype == torch.float32 else 8e-3
    assert torch.allclose(scale, wanted_scale, rtol=limit, atol=0)
    assert ((scale / wanted_scale - 1).abs() < 1e-5).float().mean() > 0.9
    ours, theirs = found[0].cpu()[:count].float(), wanted[0].float()
    assert (ours == theirs).float().mean() > 0.995
    # and where they differ, by one step
    assert ((ours - theirs).abs() <= 0.13 * theirs.abs() + 2**-9).all()


# kernels


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_quantised_as_on_the_cpu(widths: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, values = rows(widths[0], dtype) if widths[0] else None, rows(widths[1], dtype)
    found = gelu_quantize_rows(on_device(left), on_device(values))
    agree(found, gelu_quantize_rows(left, values), dtype)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_quantised_as_on_the_cpu(widths: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, columns = widths
    gradient, values = torch.randn(37, left + columns).to(dtype)[:, left:], rows(columns, dtype)
    scale = torch.rand(columns) + 0.5
    found = gelu_backward_quantize_rows(on_device(gradient), on_device(values), scale.to(DEVICE))
    agree(found, gelu_backward_quantize_rows(gradient, values, scale), dtype)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, -1])
def test_a_value_that_is_not_finite_makes_its_row_nan(
    widths: tuple[int, int], bad: float, place: int
) -> None:
    values = torch.randn(5, widths[1], device=DEVICE, dtype=torch.bfloat16)
    left = torch.randn(5, widths[0], device=DEVICE, dtype=torch.bfloat16) if widths[0] else None
    gradient = torch.randn_like(values)
    values[1, place] = gradient[2, place] = bad
    if left is not None:
        left[3, place] = bad
    forward, backward = {1} | ({3} if widths[0] else set()), {1, 2}
    ones = torch.ones(widths[1], device=DEVICE)
    for (quantized, scale), spoiled in (
        (gelu_quantize_rows(left, values), forward),
        (gelu_backward_quantize_rows(gradient, values, ones), backward),
    ):
        whole = (quantized.float() * scale)[:5]
        assert set(whole.isnan().all(1).nonzero().flatten().tolist()) == spoiled
        assert set(whole.isfinite().all(1).nonzero().flatten().tolist()) == set(range(5)) - spoiled


# layers


def layer(columns: int, out: int, copies: int) -> RowScaledLinear:
    linear = torch.nn.Linear(columns, out, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    return from_linear(linear, "fp8", fp8_compute=True, copies=copies)


def separate(x: torch.Tensor, up: Any, down: Any, left: torch.Tensor | None = None) -> torch.Tensor:
    active = torch.nn.functional.gelu(up(x), approximate="tanh")
    return down(active if left is None else torch.cat([left, active], dim=-1))


@pytest.mark.parametrize("beside", [0, 512])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_output_and_gradients_are_those_of_the_layers(beside: int, copies: int, compiled: bool) -> None:
    torch.manual_seed(0)
    up, down = layer(512, 2048, copies), layer(beside + 2048, 512, copies)
    given = torch.randn(2, 333, 512, device=DEVICE, dtype=torch.bfloat16)
    wide = torch.randn(2, 333, 512 + beside, device=DEVICE, dtype=torch.bfloat16)
    results = []
    for compute in (fp8_feed_forward, separate):
        whole = wide.clone().requires_grad_(True)
        x, *left = whole.split([512, beside] if beside else [512], dim=-1)
        call: Any = torch.compile(compute, fullgraph=True) if compiled else compute
        output = call(x, up, down, *left)
        output.backward(given)
        results.append((output.detach(), whole.grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16
        # a few values of bf16 fall to the other side, and then to another step of e4m3
        assert relative(ours, theirs) < 5e-3


# models


@pytest.mark.parametrize("compiled", [False, True])
def test_a_fused_model_computes_what_the_plain_one_does(compiled: bool) -> None:
    results = []
    for is_fused in (False, True):
        model = build("fp8", fast=False)
        if is_fused:
            # two in the block with two streams, one in each with a single stream
            assert fuse_feed_forwards(model) == 4
        if compiled:
            assert compile_blocks(repeated_blocks(model, FLUX1_DEV.blocks), activation_budget=1.0) == 3
        batch, draw = inputs(0)
        FLUX1_DEV.loss(model, batch, draw, SETTINGS).sum().backward()
        gradients = {name: one.grad for name, one in trainable(model).items() if one.grad is not None}
        with torch.no_grad():
            results.append((FLUX1_DEV.predict(model, batch, draw, SETTINGS), gradients))
    (wanted_output, wanted), (output, found) = results
    assert relative(output, wanted_output) < 0.02
    # of products whose roundings are 4 % each
    assert difference(found, wanted) < 0.06
