"""Queries, keys and values of a joint product on a GPU: kernels against the CPU, and what they spare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu.fast_models import DEVICE, SETTINGS, build, inputs
from tests.gpu.test_rotary import on_device
from tests.unit.modeling.small_models import relative
from tests.unit.modeling.test_rotary import EPS
from tests.unit.modeling.test_wide import wide_part
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.modeling.wide import WidePart, wide_norm_rotary

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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
    """As in a full-size model, which has more heads than one program takes."""
    from trainer.modeling import kernels_rotary

    monkeypatch.setattr(kernels_rotary, "_MOST_HEADS", 1)
    test_kernels_compute_what_the_cpu_does(torch.float32, kind, 64, (5, 70), (2,))


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
    """No parts are put beside each other."""
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
    assert sum("wide_norm_rotary_backward" in name for name in names) == 1
    assert not [name for name in names if "_cat" in name or "clone" in name]


def test_a_compiled_model_takes_it() -> None:
    model, (batch, draw) = build(fast=True), inputs(0)

    def step() -> None:
        FLUX1_DEV.loss(model, batch, draw, SETTINGS).sum().backward()

    step()
    names = profiled(step)
    # none is left of the heads' own, which a block without joined layers has
    turns = [name for name in names if "norm_rotary" in name]
    assert turns and all("wide" in name for name in turns)


def profiled(step: Any) -> list[str]:
    """Names of the kernels of a step."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return [event.key for event in profiler.key_averages()]
