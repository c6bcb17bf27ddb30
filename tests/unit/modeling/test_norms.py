"""Norms of attention heads in one pass, against torch's and diffusers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.normalization import RMSNorm

from tests.numerics.saved import kept_bytes
from tests.unit.modeling.small_models import case, difference, relative
from trainer.modeling.fused.norms import fuse_head_norms

CLASSES: dict[str, Any] = {"torch": torch.nn.RMSNorm, "diffusers": RMSNorm}


def norm(kind: str, width: int = 32, eps: float | None = 1e-6, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    made = CLASSES[kind](width, eps, **options)
    if made.weight is not None:
        torch.nn.init.uniform_(made.weight, 0.5, 2.0)
    return made.requires_grad_(False)


def fused(module: torch.nn.Module) -> torch.nn.Module:
    assert fuse_head_norms(module) == 1
    return module


def run(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of the input."""
    leaf = x.detach().clone().requires_grad_(True)
    output = module(leaf)
    output.float().sin().sum().backward()
    assert leaf.grad is not None
    return output.detach(), leaf.grad


def heads(dtype: torch.dtype = torch.float32, width: int = 32) -> torch.Tensor:
    torch.manual_seed(1)
    return (torch.randn(2, 5, 3, width) * torch.logspace(-2, 2, 5)[:, None, None]).to(dtype)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("width", [16, 32, 128, 256])
def test_fp32_output_and_gradient_are_the_library_s(kind: str, width: int) -> None:
    x = heads(width=width)
    wanted, found = run(norm(kind, width), x), run(fused(norm(kind, width)), x)
    assert relative(found[0], wanted[0]) < 1e-6
    assert relative(found[1], wanted[1]) < 1e-6


@pytest.mark.parametrize("kind", CLASSES)
def test_bf16_output_and_gradient_are_near_the_library_s(kind: str) -> None:
    x = heads(torch.bfloat16)
    wanted, exact = run(norm(kind).bfloat16(), x), run(norm(kind).bfloat16().float(), x.float())
    found = run(fused(norm(kind).bfloat16()), x)
    assert found[0].dtype == found[1].dtype == torch.bfloat16
    for ours, theirs, reference in zip(found, wanted, exact, strict=True):
        assert relative(ours, theirs) < 1e-2
        # rounded once, so never worse than what rounds between its steps
        assert relative(ours, reference) < 1.05 * relative(theirs, reference)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_without_an_eps_it_is_torch_s(dtype: torch.dtype, limit: float) -> None:
    """The eps matters for values whose squares are as small."""
    x = (heads() * 1e-3).to(dtype)
    wanted = run(norm("torch", eps=None).to(dtype), x)
    found = run(fused(norm("torch", eps=None).to(dtype)), x)
    assert relative(found[0], wanted[0]) < limit
    assert relative(found[1], wanted[1]) < limit


def test_views_of_any_strides() -> None:
    wide = torch.randn(2, 5, 3 * 3 * 32)
    module, plain = fused(norm("torch")), norm("torch")
    for view in wide.unflatten(-1, (3, 3, 32)).unbind(2):
        assert not view.is_contiguous()
        assert relative(module(view), plain(view)) < 1e-6
    turned = wide.unflatten(-1, (9, 32)).transpose(1, 2)
    assert relative(module(turned), plain(turned)) < 1e-6


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("shape", [(5, 32), (2, 5, 32), (2, 3, 4, 5, 32)])
def test_other_inputs_than_heads_are_the_library_s(kind: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert torch.equal(fused(norm(kind))(x), norm(kind)(x))


@pytest.mark.parametrize("kind", CLASSES)
def test_only_frozen_weights_of_a_power_of_two_are_taken(kind: str) -> None:
    for width in (8, 24, 96, 512):
        assert fuse_head_norms(norm(kind, width)) == 0, width
    assert fuse_head_norms(norm(kind).requires_grad_(True)) == 0
    assert fuse_head_norms(norm(kind, elementwise_affine=False)) == 0
    assert fuse_head_norms(CLASSES[kind]((32, 32), 1e-6).requires_grad_(False)) == 0


def test_a_norm_with_a_bias_is_diffusers_own() -> None:
    module, plain = norm("diffusers", bias=True), norm("diffusers", bias=True)
    for one in (module, plain):
        torch.nn.init.ones_(one.bias)
    fuse_head_norms(module)
    assert torch.equal(module(heads()), plain(heads()))


def test_a_norm_is_fused_once() -> None:
    module = fused(norm("torch"))
    assert fuse_head_norms(module) == 0
    assert isinstance(module, torch.nn.RMSNorm)


def test_the_values_alone_are_kept_for_backward() -> None:
    module, x = fused(norm("torch")), heads().requires_grad_(True)
    assert kept_bytes(module, lambda: module(x)) == x.numel() * 4


def test_all_head_norms_of_a_model_are_found() -> None:
    """Four in a block with two streams, two in one with a single stream; outputs and gradients stay."""
    plain, one = case("flux1_dev"), case("flux1_dev")
    assert fuse_head_norms(one.model) == 1 * 4 + 2 * 2
    (wanted_output, wanted), (output, found) = plain.gradients(), one.gradients()
    assert relative(output, wanted_output) < 1e-6
    assert difference(found, wanted) < 1e-5
