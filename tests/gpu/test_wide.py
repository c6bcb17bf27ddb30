"""Queries, keys and values of a joint product on a GPU: kernels against the CPU, and what they spare."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.fast_models import DEVICE, SETTINGS, build, inputs
from tests.gpu.test_rotary import on_device
from tests.unit.modeling.small_models import relative
from tests.unit.modeling.streams import LowRank, WidePart, wide_norm_rotary
from tests.unit.modeling.test_joint_qkv import added_before, low_rank, run_added, wide_part
from tests.unit.modeling.test_rotary import EPS
from trainer.families.flux1_dev import FLUX1_DEV

pytestmark = pytest.mark.gpu


def run(
    first: WidePart, second: WidePart | None, gradients: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and gradients of the products, on the CPU."""
    parts = [(one[0].detach().requires_grad_(True), *one[1:]) for one in (first, second) if one is not None]
    outputs = wide_norm_rotary(parts[0], parts[1] if second else None, EPS)
    torch.autograd.backward(outputs, gradients)
    return [one.detach().cpu() for one in outputs], [one[0].grad.cpu() for one in parts]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("tokens", [(37, 0), (5, 70), (64, 1)])
@pytest.mark.parametrize("turned", [(), (2,), (0, 1, 2)])
def test_kernels_compute_what_the_cpu_does(
    dtype: torch.dtype, kind: str, width: int, tokens: tuple[int, int], turned: tuple[int, ...]
) -> None:
    """Gradients come with tokens before heads or, those `turned`, after them."""
    torch.manual_seed(0)
    first, second = (wide_part(count, kind, width=width, dtype=dtype) if count else None for count in tokens)
    assert first is not None
    gradients = [torch.randn(2, sum(tokens), 3, width).to(dtype) for _ in range(3)]
    wanted = run(first, second, gradients)
    given = [one.to(DEVICE) for one in gradients]
    for which in turned:
        given[which] = given[which].transpose(1, 2).contiguous().transpose(1, 2)
    found = run(on_device(first), on_device(second), given)
    for ours, theirs in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        assert relative(ours, theirs) < (1e-5 if dtype == torch.float32 else 1e-3)
    start = 0
    for one in found[1]:
        values = one.unflatten(-1, (3, 3, width))[:, :, 2]
        assert one.is_contiguous() and torch.equal(values, gradients[2][:, start : start + one.shape[1]])
        start += one.shape[1]


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_heads_of_several_programs_are_each_their_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full-size model has more heads than one program of the kernel takes."""
    from trainer.modeling.triton import norm_rotary as kernels

    monkeypatch.setattr(kernels, "_MOST_HEADS", 1)
    test_kernels_compute_what_the_cpu_does(torch.float32, kind, 64, (5, 70), (2,))


# the largest values of bf16 are rounded by this at most
BF16 = 0.01


def added_part(one: LowRank, device: str, dtype: torch.dtype) -> LowRank:
    hidden, ups = one
    return hidden.to(device, dtype), tuple(up.to(device, dtype) for up in ups)


def as_fp32(part: WidePart) -> Any:
    return tuple(None if one is None else one.float() for one in part)


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("ranks", [(4, 4), (16, 16), (16, 4), (3, 12)])
@pytest.mark.parametrize("tokens", [(5, 70), (64, 1), (37, 130)])
def test_kernels_add_what_the_cpu_does(
    kind: str, width: int, ranks: tuple[int, int], tokens: tuple[int, int]
) -> None:
    """The sum is not rounded there, and what it is compared with is in fp32."""
    torch.manual_seed(0)
    parts = [wide_part(count, kind, width=width, dtype=torch.bfloat16) for count in tokens]
    added = [
        low_rank(count, (rank, rank, rank), width=width, dtype=torch.bfloat16)
        for count, rank in zip(tokens, ranks, strict=True)
    ]
    gradients = [torch.randn(2, sum(tokens), 3, width).bfloat16() for _ in range(3)]
    exact = [added_part(one, "cpu", torch.float32) for one in added]
    wanted = run_added(added_before, [as_fp32(one) for one in parts], exact, [g.float() for g in gradients])
    given = [one.to(DEVICE) for one in gradients]
    given[2] = given[2].transpose(1, 2).contiguous().transpose(1, 2)
    here = [added_part(one, DEVICE, torch.bfloat16) for one in added]
    found = [run_added(wide_norm_rotary, [on_device(one) for one in parts], here, given) for _ in range(2)]
    for ours, again, theirs in zip(*found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16 and ours.shape == theirs.shape
        assert relative(ours, theirs) < BF16
        assert torch.equal(ours, again)


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_gradients_of_several_programs_are_added_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.modeling.triton import norm_rotary as kernels

    monkeypatch.setattr(kernels, "_MOST_HEADS", 1)
    test_kernels_add_what_the_cpu_does(kind, 64, (16, 4), (5, 70))


@pytest.mark.parametrize("ranks", [((4, 8, 4), (4, 4, 4)), ((4, 4, 4), (80, 80, 80))])
def test_what_kernels_do_not_add_is_added_before(ranks: tuple[tuple[int, int, int], ...]) -> None:
    """Ranks that differ in a stream, and such as a program cannot hold."""
    torch.manual_seed(0)
    tokens = (5, 70)
    parts = [on_device(wide_part(count, "real", width=64, dtype=torch.bfloat16)) for count in tokens]
    added = [
        added_part(low_rank(count, each, width=64), DEVICE, torch.bfloat16)
        for count, each in zip(tokens, ranks, strict=True)
    ]
    gradients = [torch.randn(2, sum(tokens), 3, 64, device=DEVICE).bfloat16() for _ in range(3)]
    found = run_added(wide_norm_rotary, parts, added, gradients)
    wanted = run_added(added_before, parts, added, gradients)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def test_a_compiled_step_adds_on_the_way() -> None:
    parts = [on_device(wide_part(count, "real", width=64, dtype=torch.bfloat16)) for count in (40, 96)]
    added = [
        added_part(low_rank(count, (16, 16, 16), width=64), DEVICE, torch.bfloat16) for count in (40, 96)
    ]

    def step(function: Any) -> list[torch.Tensor]:
        gradients = [torch.ones(2, 136, 3, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
        return run_added(function, parts, added, gradients)

    compiled = torch.compile(wide_norm_rotary, fullgraph=True)
    for ours, theirs in zip(step(compiled), step(wide_norm_rotary), strict=True):
        assert relative(ours, theirs) < 2e-2
    names = profiled(lambda: step(compiled))
    assert sum("norm_rotary_backward" in name for name in names) == 1
    assert not [name for name in names if "add_low_rank" in name]


def test_products_and_gradients_that_are_not_aligned_are_copied() -> None:
    torch.manual_seed(0)
    wide, *rest = on_device(wide_part(9, "real", width=64, dtype=torch.bfloat16))
    spread = torch.empty(2, 9, 577, dtype=wide.dtype, device=DEVICE)[..., 1:].copy_(wide)
    found = []
    for one in (wide, spread):
        leaf = one.detach().requires_grad_(True)
        outputs = wide_norm_rotary((leaf, *rest), None, EPS)
        # a gradient of one value everywhere has no strides
        torch.cat(outputs).sum().backward()
        found.append([*outputs, leaf.grad])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("tokens", [(64, 0), (40, 96)])
def test_a_compiled_step_writes_everything_once(tokens: tuple[int, int]) -> None:
    """A compiled step writes no result by concatenating parts."""
    parts: list[Any] = [
        on_device(wide_part(count, "real", width=64, dtype=torch.bfloat16)) for count in tokens if count
    ]
    weights = [torch.randn(576, 576, device=DEVICE, dtype=torch.bfloat16) for _ in parts]

    def compute(*products: torch.Tensor) -> torch.Tensor:
        whole = [
            (one @ weight, *part[1:]) for one, weight, part in zip(products, weights, parts, strict=True)
        ]
        query, key, value = wide_norm_rotary(whole[0], whole[1] if len(whole) == 2 else None, EPS)
        return (query * key * value).float().square().mean()

    compiled = torch.compile(compute, fullgraph=True)
    results = []
    for function in (compute, compiled):
        leaves = [part[0].detach().clone().requires_grad_(True) for part in parts]
        function(*leaves).backward()
        results.append([leaf.grad for leaf in leaves])
    assert all(relative(ours, theirs) < 2e-2 for ours, theirs in zip(*results, strict=True))
    names = profiled(lambda: compiled(*leaves).backward())
    assert sum("norm_rotary_backward" in name for name in names) == 1
    assert not [name for name in names if "_cat" in name or "clone" in name]


def test_a_compiled_model_takes_it() -> None:
    model, (batch, draw) = build(fast=True), inputs(0)

    def step() -> None:
        FLUX1_DEV.loss(model, batch, draw, SETTINGS).sum().backward()

    step()
    launches = profiled(step)
    # a block without joined layers norms and turns queries and keys by a kernel each
    assert sum(count for name, count in launches.items() if "norm_rotary_backward" in name) == 3


def profiled(step: Any) -> dict[str, int]:
    """Launches of a step by the kernels' names."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return {event.key: event.count for event in profiler.key_averages()}
