"""fp32 masters of bf16 parameters in one tensor: sums, what is missing, what the model gets."""

from __future__ import annotations

import pytest
import torch

from trainer.engine.optimizing.fp32_masters import FlatMasters

# none of these sizes is a multiple of the alignment
SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 3, 11), "scalar": ()}


def parameters(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()}


def give(held: dict[str, torch.nn.Parameter], seed: int, missing: tuple[str, ...] = ()) -> dict:
    """Random bf16 gradients on the parameters; returned in fp32, zeros where one is missing."""
    generator = torch.Generator().manual_seed(seed)
    given = {}
    for name, parameter in held.items():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if name in missing else gradient
        given[name] = torch.zeros(parameter.shape) if name in missing else gradient.float()
    return given


def test_masters_start_as_the_parameters() -> None:
    held = parameters()
    masters = FlatMasters(held)
    assert {name: tuple(view.shape) for name, view in masters.views.items()} == SHAPES
    for name, view in masters.views.items():
        assert view.dtype == torch.float32
        assert torch.equal(view, held[name].detach().float())


def test_gradients_of_three_micro_batches_are_summed_in_fp32() -> None:
    held = parameters()
    masters = FlatMasters(held)
    wanted = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for seed in range(3):
        for name, gradient in give(held, seed).items():
            wanted[name] += gradient
        masters.accumulate()
        assert all(parameter.grad is None for parameter in held.values())
    found = masters.by_name(masters.gradient)
    assert all(torch.equal(found[name], wanted[name]) for name in SHAPES)
    # a sum in bf16 would have been another
    assert any(not torch.equal(sum_, sum_.bfloat16().float()) for sum_ in wanted.values())


@pytest.mark.parametrize("missing", [("b",), ("a", "scalar"), ("a", "b", "c")])
def test_a_missing_gradient_counts_as_zero(missing: tuple[str, ...]) -> None:
    """A missing gradient is not replaced by the gradient of the micro-batch before."""
    held = parameters()
    masters = FlatMasters(held)
    wanted = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for seed, absent in enumerate([(), missing, ()]):
        for name, gradient in give(held, seed, absent).items():
            wanted[name] += gradient
        masters.accumulate()
    found = masters.by_name(masters.gradient)
    assert all(torch.equal(found[name], wanted[name]) for name in SHAPES)


def test_no_gradient_at_all_changes_nothing() -> None:
    held = parameters()
    masters = FlatMasters(held)
    give(held, 0)
    masters.accumulate()
    before = masters.gradient.clone()
    masters.accumulate()
    assert torch.equal(masters.gradient, before)


def test_the_sum_stays_in_the_same_memory() -> None:
    """A CUDA graph adds to where it was captured."""
    held = parameters()
    masters = FlatMasters(held)
    places = [masters.gradient.data_ptr(), masters.flat.data_ptr(), masters.latest.latest.data_ptr()]
    give(held, 0)
    masters.accumulate()
    masters.flat.grad = masters.gradient
    masters.drop_gradients()
    give(held, 1)
    masters.accumulate()
    assert places == [masters.gradient.data_ptr(), masters.flat.data_ptr(), masters.latest.latest.data_ptr()]


def test_dropped_gradients_do_not_come_back() -> None:
    held = parameters()
    masters = FlatMasters(held)
    give(held, 0)
    masters.accumulate()
    give(held, 1)
    masters.flat.grad = masters.gradient
    masters.drop_gradients()
    assert masters.flat.grad is None and all(parameter.grad is None for parameter in held.values())
    wanted = give(held, 2)
    masters.accumulate()
    found = masters.by_name(masters.gradient)
    assert all(torch.equal(found[name], wanted[name]) for name in SHAPES)


def test_publishing_rounds_to_the_parameters_type() -> None:
    held = parameters()
    masters = FlatMasters(held)
    places = {name: parameter.data_ptr() for name, parameter in held.items()}
    with torch.no_grad():
        # below half a step of bf16: seen by the master, not by the parameter
        masters.flat += 1e-4
    changed = {name: view.clone() for name, view in masters.views.items()}
    masters.publish()
    for name, parameter in held.items():
        assert parameter.dtype == torch.bfloat16 and parameter.data_ptr() == places[name]
        assert torch.equal(parameter.detach(), changed[name].bfloat16())
        assert torch.equal(masters.views[name], changed[name])


def test_a_bad_gradient_is_seen_in_the_sum() -> None:
    held = parameters()
    masters = FlatMasters(held)
    give(held, 0)
    held["b"].grad[3] = float("nan")
    masters.accumulate()
    assert masters.gradient.isnan().sum() == 1


def test_views_share_memory_and_never_overlap() -> None:
    masters = FlatMasters(parameters())
    flat = torch.zeros_like(masters.gradient)
    for number, view in enumerate(masters.by_name(flat).values(), start=1):
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert (view.data_ptr() - flat.data_ptr()) % 32 == 0
        assert not view.any()
        view.fill_(number)
    assert [int((flat == number).sum()) for number in (1, 2, 3, 4)] == [15, 7, 66, 1]
    with torch.no_grad():
        masters.flat.fill_(5.0)
    assert all((view == 5.0).all() for view in masters.views.values())


def test_the_gaps_between_parameters_stay_zero() -> None:
    """The norm of the whole is the norm of the gradients."""
    held = parameters()
    masters = FlatMasters(held)
    wanted = torch.cat([gradient.flatten() for gradient in give(held, 0).values()]).norm()
    masters.accumulate()
    assert masters.gradient.norm().item() == pytest.approx(wanted.item(), rel=1e-6)
    assert masters.flat.numel() > sum(parameter.numel() for parameter in held.values())
