"""The kernel of split masters on a GPU: what plain torch computes, and what fp32 AdamW learns."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.config.schema import TrainSection
from trainer.engine.optimizing.split_adamw import (
    decoded_first,
    decoded_second,
    joined,
    seed_of,
    update_halves,
)
from trainer.engine.optimizing.updater import Updater
from trainer.engine.ranks import ALONE
from trainer.engine.records import checkpoint
from trainer.engine.training.state import restore
from trainer.modeling.vision import make_torchvision_importable

make_torchvision_importable()
pytestmark = pytest.mark.gpu
DEVICE = "cuda"
RATE, BETAS, KIND = 1e-5, (0.9, 0.999), "adamw_split_bf16"


def gradient(count: int, step: int, scale: float = 1e-3) -> torch.Tensor:
    stays = torch.randn(count, generator=torch.Generator(DEVICE).manual_seed(7), device=DEVICE)
    chance = torch.randn(count, generator=torch.Generator(DEVICE).manual_seed(step), device=DEVICE)
    return (scale * (0.3 * stays + chance)).bfloat16()


def start(count: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return (0.02 * torch.randn(count, generator=generator, device=DEVICE)).bfloat16()


@pytest.mark.parametrize("count", [1, 1023, 1_000_000, 2**20])
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masters", [True, False])
def test_the_kernel_computes_what_plain_torch_does(count: int, gradients: torch.dtype, masters: bool) -> None:
    from trainer.modeling.triton import split_adamw as kernel

    def fresh() -> list[Any]:
        low, first, second = (torch.zeros(count, dtype=torch.int16, device=DEVICE) for _ in range(3))
        return [start(count), low if masters else None, first, second]

    ours, twin = fresh(), fresh()
    factor = torch.tensor(0.7, device=DEVICE)
    for step in range(1, 21):
        bad = torch.tensor(float(step == 9), device=DEVICE)
        given = gradient(count, step, 1e-3 if step < 12 else 1e-4).to(gradients)
        scale = (1 - BETAS[1] ** step) ** 0.5
        settings = {"betas": BETAS, "keep": 1 - 1e-7, "size": RATE / (1 - BETAS[0] ** step), "scale": scale}
        before = [one.clone() for one in ours if one is not None]
        for update, tensors in ((kernel.update, ours), (update_halves, twin)):
            # rows of a tensor that begin at this place
            update(*tensors, given, factor, bad, **settings, eps=1e-8, seed=seed_of(step, 3), begin=2**31 - 7)
        after = [one for one in ours if one is not None]
        assert (step == 9) == all(map(torch.equal, before, after))
    # a product may be rounded once where plain torch rounds twice, and then a moment to the other side: the
    # first moment keeps such a step of 2**-9 of what it was, also where later gradients bring it near zero
    if masters:
        torch.testing.assert_close(joined(*ours[:2]), joined(*twin[:2]), rtol=0.0, atol=5e-7)
    else:  # where a product is rounded otherwise, chance may go to the other side
        assert (ours[0] != twin[0]).float().mean() < 0.01
    torch.testing.assert_close(decoded_first(ours[2]), decoded_first(twin[2]), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(decoded_second(ours[3]), decoded_second(twin[3]), rtol=2**-8, atol=1e-20)
    if count > 1023:
        assert sum((a != b).float().mean().item() for a, b in zip(ours[2:], twin[2:], strict=True)) < 0.01


@pytest.mark.parametrize("kind", [KIND, "adamw_stochastic_bf16"])
def test_many_parameters_are_updated_by_one_kernel_as_on_a_cpu(kind: str) -> None:
    """Aligned ones by one kernel, the others by one each; plain torch on a CPU is the oracle."""
    counts = {"one": 1, "block": 1024, "wide": 300_001, "large": 2**20, "apart": 5000, "fp32": 77}

    def values(device: str) -> dict[str, torch.nn.Parameter]:
        found = {}
        for name, count in counts.items():
            weight = start(count).to(device)
            held = weight.float() if name == "fp32" else weight
            found[name] = torch.nn.Parameter(held)
        return found

    ours, twins = values(DEVICE), values("cpu")
    settings = TrainSection(max_grad_norm=0.5)
    updaters = [Updater(own, settings, kind) for own in (ours, twins)]
    for step in range(1, 6):
        for place, (name, count) in enumerate(counts.items()):
            given = gradient(count + 1, 10 * step + place)
            # the second value of an allocation is no multiple of 16 bytes
            ours[name].grad = (given[1:] if name == "apart" else given[1:].clone()).to(ours[name].dtype)
            twins[name].grad = given[1:].cpu().to(twins[name].dtype)
        # of the twin's own sum on a CPU torch makes 3e-5 less: 2**20 squares are many for fp32
        wanted = torch.stack([one.grad.double().norm() for one in twins.values() if one.grad is not None])
        if step == 5:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profiler:
                norm, _ = updaters[0].step(RATE, torch.tensor(1.0, device=DEVICE))
                torch.cuda.synchronize()
            launched = {event.key: event.count for event in profiler.key_averages()}
            assert (launched["_update_all"], launched["_squares"], launched["_update"]) == (1, 1, 1)
        else:
            norm, _ = updaters[0].step(RATE, torch.tensor(1.0, device=DEVICE))
        updaters[1].step(RATE, torch.tensor(1.0))
        assert norm.item() == pytest.approx(wanted.norm().item(), rel=1e-5)
    state, oracle = updaters[0].state(), updaters[1].state()
    assert state.keys() == oracle.keys()
    for name, count in counts.items():
        weight, twin = ours[name].detach().cpu(), twins[name].detach()
        if f"{name}/low" in state:
            weight = joined(weight, state[f"{name}/low"].cpu())
            twin = joined(twin, oracle[f"{name}/low"])
        if kind == KIND or name == "fp32":
            torch.testing.assert_close(weight.float(), twin.float(), rtol=0.0, atol=5e-7)
        elif count > 1:  # where a product is rounded otherwise, chance may go to the other side
            assert (weight != twin).float().mean() < 0.01, name


def test_beside_fp32_adamw_on_the_gpu() -> None:
    count = 1_000_000
    held, twin = torch.nn.Parameter(start(count)), torch.nn.Parameter(start(count).float())
    settings = TrainSection(max_grad_norm=1e9)
    updater = Updater({"w": held}, settings, KIND)
    oracle = torch.optim.AdamW([twin], lr=RATE, betas=BETAS, weight_decay=0.01, fused=True)
    for step in range(550):
        held.grad = gradient(count, step, 1e-3 if step < 50 else 1e-4)
        twin.grad = held.grad.float()
        updater.accumulate()
        updater.step(RATE, torch.tensor(1.0, device=DEVICE))
        oracle.step()
        if step == 49:
            moved = joined(held.detach(), updater.state()["w/low"]) - start(count).float()
            wanted = twin.detach() - start(count).float()
            assert (moved - wanted).norm() / wanted.norm() < 2e-3
    second = decoded_second(updater.state()["w/exp_avg_sq"]).mean().item()
    assert second == pytest.approx(oracle.state[twin]["exp_avg_sq"].mean().item(), rel=0.01)


def test_a_resume_on_the_gpu_is_exact() -> None:
    def steps(updater: Updater, held: torch.nn.Parameter, numbers: range) -> None:
        for step in numbers:
            held.grad = gradient(5000, step)
            updater.accumulate()
            updater.step(RATE, torch.tensor(1.0, device=DEVICE))

    whole, half, rest = (torch.nn.Parameter(start(5000)) for _ in range(3))
    straight = Updater({"w": whole}, TrainSection(), KIND)
    steps(straight, whole, range(10))
    first = Updater({"w": half}, TrainSection(), KIND)
    steps(first, half, range(5))
    second = Updater({"w": rest}, TrainSection(), KIND)
    second.load(first.weights(), first.state(), 5)
    steps(second, rest, range(5, 10))
    assert torch.equal(rest, whole)
    for name, value in straight.state().items():
        assert torch.equal(second.state()[name], value), name


def test_updates_below_bf16_resolution_are_not_lost_on_the_gpu() -> None:
    """A thousand updates of 1e-3 near 8, where bf16 steps by 0.03: plain bf16 would not move."""
    held = torch.nn.Parameter(torch.full((64, 64), 8.0, dtype=torch.bfloat16, device=DEVICE))
    updater = Updater({"w": held}, TrainSection(weight_decay=0.0), KIND)
    for _ in range(1000):
        held.grad = torch.ones_like(held)
        updater.accumulate()
        updater.step(1e-3, torch.tensor(1.0, device=DEVICE))
    assert held.float().mean().item() == pytest.approx(7.0, abs=0.07)


def test_a_checkpoint_of_optimis_kernel_goes_on() -> None:
    """Beside fp32 AdamW that saw all gradients; optimi's own Triton kernel made the checkpoint."""
    from optimi import AdamW

    count, steps = 100_000, 20
    old, held = (torch.nn.Parameter(start(count)) for _ in range(2))
    twin = torch.nn.Parameter(start(count).float())
    theirs = AdamW([old], RATE, (0.9, 0.99), 0.0, eps=1e-8, kahan_sum=True, triton=DEVICE == "cuda")
    oracle = torch.optim.AdamW([twin], lr=RATE, betas=BETAS, weight_decay=0.0)
    for step in range(steps):
        old.grad = gradient(count, step)
        twin.grad = old.grad.float()
        theirs.step()
        oracle.step()
    state = {f"w/{key}": value for key, value in theirs.state[old].items() if torch.is_tensor(value)}
    updater = Updater({"w": held}, TrainSection(max_grad_norm=1e9, weight_decay=0.0), KIND)
    updater.load({"w": old.detach()}, state, steps)
    exact, before = old.detach().float() + state["w/kahan_comp"].float(), twin.detach().clone()
    assert torch.equal(joined(held.detach(), updater.state()["w/low"]), exact)
    for step in range(steps, 2 * steps):
        held.grad = gradient(count, step)
        twin.grad = held.grad.float()
        updater.accumulate()
        updater.step(RATE, torch.tensor(1.0, device=DEVICE))
        oracle.step()
    moved, wanted = joined(held.detach(), updater.state()["w/low"]) - exact, twin.detach() - before
    assert (moved - wanted).norm() / wanted.norm() < 0.03


def test_going_on_takes_no_more_memory_than_the_next_steps(tmp_path: Path) -> None:
    """Eight bytes a parameter lie on the device; a checkpoint that was read onto it would add as many."""
    counts, none = [2**22] * 8, torch.zeros((), device=DEVICE)

    def fresh() -> Updater:
        parameters = {str(number): torch.nn.Parameter(start(count)) for number, count in enumerate(counts)}
        return Updater(parameters, TrainSection(), KIND)

    first = fresh()
    for parameter in first.parameters.values():
        parameter.grad = gradient(parameter.numel(), 1)
    first.step(RATE, none)
    snapshot = checkpoint.Snapshot(step=1, interval_loss=0.0, interval_steps=1, fingerprint={})
    given = {"least_bytes": 0, "keep": 1, "on_tensor": lambda: None}
    folder = checkpoint.save(tmp_path, snapshot, *first.saved(), **given)
    wanted = {name: value.cpu() for name, value in first.state().items()}
    del first
    gc.collect()
    before = torch.cuda.memory_allocated()  # other tests of this process may hold some
    second = fresh()
    torch.cuda.reset_peak_memory_stats()
    status = SimpleNamespace(beat=lambda phase: None)
    context: Any = SimpleNamespace(device=DEVICE, ranks=ALONE, status=status, say=lambda text: None)
    begun: Any = SimpleNamespace(found=(folder, snapshot))
    restore(context, second, begun)
    assert torch.cuda.max_memory_allocated() - before < 9 * sum(counts)
    assert all(torch.equal(value.cpu(), wanted[name]) for name, value in second.state().items())
