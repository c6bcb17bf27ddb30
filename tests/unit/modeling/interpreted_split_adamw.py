"""The kernel that updates many parameters in Triton's interpreter, beside plain torch.

Triton reads its mode when it is imported: `test_fp8_kernels` runs this file in a process of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trainer.engine.optimizing import one_launch
from trainer.engine.optimizing.split_adamw import joined, seed_of, update_halves

COUNTS = (1, 1023, 1024, 4096, 4097, 9000)
BETAS = (0.9, 0.999)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of kernels, with parts of four blocks."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patched = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        # its own converts arrays of one dimension, which numpy no longer does
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    found = importlib.import_module("trainer.modeling.triton.split_adamw")
    monkeypatch.setattr(found, "PART", 4096)
    monkeypatch.setattr(one_launch, "kernel", found, raising=False)
    yield found


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
def test_many_parameters_have_the_steps_that_each_would_have(
    kernel: Any, masters: bool, gradients: torch.dtype
) -> None:
    chance = torch.Generator().manual_seed(0)

    def fresh(count: int) -> list[torch.Tensor]:
        weight = torch.randn(count, generator=chance).mul_(0.02).bfloat16()
        return [weight, *(torch.zeros(count, dtype=torch.int16) for _ in range(3))]

    ours = [fresh(count) for count in COUNTS]
    twins = [[one.clone() for one in tensors] for tensors in ours]
    launches, factor = one_launch.Launches(), torch.tensor(0.7)
    for step in (1, 2, 3):
        given = [torch.randn(count, generator=chance).mul_(1e-3).to(gradients) for count in COUNTS]
        bad = torch.tensor(float(step == 2))
        scale = (1 - BETAS[1] ** step) ** 0.5
        size = 1e-5 / (1 - BETAS[0] ** step)
        settings = {"betas": BETAS, "keep": 1 - 1e-7, "size": size, "scale": scale, "eps": 1e-8}
        rows = [
            one_launch.Row(
                own[0], own[1 if masters else 0], own[2], own[3], one, 7 * place, seed_of(step, place)
            )
            for place, (own, one) in enumerate(zip(ours, given, strict=True))
        ]
        assert all(row.fits for row in rows)
        (launch,) = launches.of(rows)
        squares = sum(one.double().square().sum() for one in given)
        torch.testing.assert_close(launch.squares().double(), squares, rtol=1e-6, atol=0.0)
        before = [one.clone() for own in ours for one in own]
        kernel.update_all(
            launch.table, launch.parts, factor, bad, masters=masters, fp32=launch.fp32, **settings
        )
        assert (step == 2) == all(map(torch.equal, before, (one for own in ours for one in own)))
        for place, (own, one) in enumerate(zip(twins, given, strict=True)):
            low = own[1] if masters else None
            where = {"seed": seed_of(step, place), "begin": 7 * place}
            update_halves(own[0], low, own[2], own[3], one, factor, bad, **where, **settings)
    for own, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(joined(*own[:2]), joined(*twin[:2]), rtol=0.0, atol=1e-8)
        # a sum may be rounded otherwise, and then a moment to the other side
        assert sum((a != b).float().mean().item() for a, b in zip(own[2:], twin[2:], strict=True)) < 0.01


def test_parameters_of_each_type_of_gradient_have_a_launch(kernel: Any) -> None:
    def row(dtype: torch.dtype) -> one_launch.Row:
        weight, moment = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int16)
        return one_launch.Row(weight, moment, moment, moment, torch.zeros(8, dtype=dtype), 0, 0)

    rows = [row(torch.bfloat16), row(torch.float32), row(torch.bfloat16)]
    assert [(one.fp32, len(one.rows)) for one in one_launch.Launches().of(rows)] == [(False, 2), (True, 1)]
    apart = torch.zeros(9, dtype=torch.bfloat16)[1:]
    assert not rows[0]._replace(gradient=apart).fits
