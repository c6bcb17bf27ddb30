"""Updates: masters, bad steps, resume."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from trainer.config.schema import TrainSection
from trainer.engine.optimizing.schedule import learning_rate
from trainer.engine.optimizing.updater import Average, Updater
from trainer.modeling.vision import make_torchvision_importable


def parameters(dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(4, 8, generator=generator).to(dtype)) for name in ("a.w", "b.w")
    }


def gradients(held: dict[str, torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in held.values():
        parameter.grad = torch.randn(4, 8, generator=generator).to(parameter.dtype)


KINDS = [
    ("adamw_fused_fp32", torch.float32),
    ("adamw_fused_fp32", torch.bfloat16),
    ("adamw_split_bf16", torch.bfloat16),
    ("adamw_stochastic_bf16", torch.bfloat16),
    ("adamw_8bit", torch.bfloat16),
    ("adamw_8bit", torch.float32),
    ("prodigy", torch.bfloat16),
    ("prodigy", torch.float32),
]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_five_steps_and_a_resume_equal_ten(kind: str, dtype: torch.dtype) -> None:
    rate = 1.0 if kind == "prodigy" else 1e-3
    train = TrainSection(learning_rate=rate)
    straight = parameters(dtype)
    updater = Updater(straight, train, kind)
    for step in range(10):
        gradients(straight, step)
        updater.accumulate()
        updater.step(rate, torch.tensor(1.0))
        if step == 4:
            weights = {name: value.clone() for name, value in updater.weights().items()}
            state = {name: value.clone() for name, value in updater.state().items()}
    resumed = parameters(dtype)
    again = Updater(resumed, train, kind)
    again.load(weights, state, 5)
    for step in range(5, 10):
        gradients(resumed, step)
        again.accumulate()
        again.step(rate, torch.tensor(1.0))
    for name in straight:
        assert torch.equal(straight[name], resumed[name])
    assert any(
        not torch.equal(again.weights()[name], start.float()) for name, start in parameters(dtype).items()
    )


def test_weights_that_a_bf16_model_keeps_in_fp32_resume_to_the_bit() -> None:
    def mixed() -> dict[str, torch.nn.Parameter]:
        held = parameters(torch.bfloat16)
        return held | {"norm.w": torch.nn.Parameter(torch.ones(4, 8))}

    straight, resumed = mixed(), mixed()
    updater = Updater(straight, TrainSection(), "adamw_split_bf16")
    for step in range(10):
        gradients(straight, step)
        updater.step(1e-3, torch.tensor(1.0))
        if step == 4:
            weights = {name: value.clone() for name, value in updater.weights().items()}
            state = {name: value.clone() for name, value in updater.state().items()}
    again = Updater(resumed, TrainSection(), "adamw_split_bf16")
    again.load(weights, state, 5)
    for step in range(5, 10):
        gradients(resumed, step)
        again.step(1e-3, torch.tensor(1.0))
    for name in straight:
        assert torch.equal(straight[name], resumed[name]), name


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("broken", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_nothing(kind: str, dtype: torch.dtype, broken: str) -> None:
    held = parameters(dtype)
    updater = Updater(held, TrainSection(), kind)
    gradients(held, 0)
    updater.accumulate()
    updater.step(1e-3, torch.tensor(1.0))
    before = {name: value.clone() for name, value in (updater.weights() | updater.state()).items()}
    gradients(held, 1)
    loss = torch.tensor(float("nan") if broken == "loss" else 1.0)
    if broken == "gradient":
        assert held["a.w"].grad is not None
        held["a.w"].grad[0, 0] = float("inf")
    updater.accumulate()
    _, bad = updater.step(1e-3, loss)
    assert bad.item() == 1.0
    for name, value in (updater.weights() | updater.state()).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", ["adamw_fused_fp32", "adamw_split_bf16", "adamw_stochastic_bf16"])
def test_updates_below_bf16_resolution_are_not_lost(kind: str) -> None:
    """A thousand updates of 1e-3 near 8, where bf16 steps by 0.03: plain bf16 would not move."""
    held = {"w": torch.nn.Parameter(torch.full((4, 4), 8.0, dtype=torch.bfloat16))}
    updater = Updater(held, TrainSection(weight_decay=0.0), kind)
    for _ in range(1000):
        held["w"].grad = torch.ones(4, 4, dtype=torch.bfloat16)
        updater.accumulate()
        updater.step(1e-3, torch.tensor(1.0))
    assert held["w"].float().mean().item() == pytest.approx(7.0, abs=0.07)


def test_gradients_accumulate_in_fp32_for_bf16_parameters() -> None:
    held = {"w": torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))}
    updater = Updater(held, TrainSection(), "adamw_fused_fp32")
    for value in (256.0, 1.0, 1.0):  # bf16 cannot hold 257
        held["w"].grad = torch.tensor([value], dtype=torch.bfloat16)
        updater.accumulate()
    assert updater.flat is not None
    assert updater.flat.gradient[0].item() == 258.0


def of_a_library(kind: str, values: list[torch.nn.Parameter], settings: Any) -> torch.optim.Optimizer:
    """The optimizer that is meant, over values in fp32."""
    if kind != "prodigy":
        return torch.optim.AdamW(values, **settings)
    from prodigyopt import Prodigy

    return Prodigy(values, use_bias_correction=True, safeguard_warmup=True, **settings)


@pytest.mark.parametrize("clip", [1e9, 2.0])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_every_setting_reaches_the_optimizer(kind: str, dtype: torch.dtype, clip: float) -> None:
    """Values far from the defaults, and a rate that rises, against the libraries over values in fp32."""
    train = TrainSection(
        adam_beta1=0.6,
        adam_beta2=0.7,
        adam_epsilon=0.3,
        weight_decay=0.4,
        lr_warmup_steps=3,
        max_grad_norm=clip,
    )
    held, start = parameters(dtype), [value.detach().float() for value in parameters(dtype).values()]
    twins = [torch.nn.Parameter(value.clone()) for value in start]
    settings = {"lr": 1.0, "betas": (0.6, 0.7), "eps": 0.3, "weight_decay": 0.4}
    updater, oracle = Updater(held, train, kind), of_a_library(kind, twins, settings)
    steps, peak = (60, 1.0) if kind == "prodigy" else (8, 0.1)
    for step in range(steps):
        gradients(held, step)
        for parameter, twin in zip(held.values(), twins, strict=True):
            assert parameter.grad is not None
            parameter.grad += 1.0
            twin.grad = parameter.grad.float().clone()
        rate = peak * min(1.0, (step + 1) / 3)
        oracle.param_groups[0]["lr"] = rate
        whole = torch.nn.utils.clip_grad_norm_(twins, clip)
        updater.accumulate()
        norm, _ = updater.step(rate, torch.tensor(1.0))
        assert norm.item() == pytest.approx(whole.item(), rel=1e-3)
        oracle.step()
    found = torch.stack([*updater.weights().values()]).float() - torch.stack(start)
    wanted = torch.stack(twins).detach() - torch.stack(start)
    # weights that are bf16 themselves are rounded to its eight bits
    assert (found - wanted).norm() / wanted.norm() < (0.02 if "bf16" in kind else 1e-4)


def test_clipping_reports_the_norm_before_it() -> None:
    held = {"w": torch.nn.Parameter(torch.zeros(2))}
    updater = Updater(held, TrainSection(max_grad_norm=1.0), "adamw_fused_fp32")
    held["w"].grad = torch.tensor([3.0, 4.0])
    norm, bad = updater.step(1e-3, torch.tensor(0.0))
    assert (norm.item(), bad.item()) == (5.0, 0.0)


def test_schedules() -> None:
    constant = TrainSection(learning_rate=1e-3, lr_warmup_steps=4, max_train_steps=10)
    assert [learning_rate(constant, step) for step in (1, 2, 4, 5, 10)] == [2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3]
    cosine = TrainSection(learning_rate=1e-3, lr_scheduler="cosine", max_train_steps=10)
    rates = [learning_rate(cosine, step) for step in range(1, 11)]
    assert rates[0] == 1e-3
    assert rates == sorted(rates, reverse=True)
    assert rates[5] == pytest.approx(5e-4)
    assert 0 < rates[-1] < 1e-4


@pytest.mark.parametrize(("kind", "dtype"), KINDS[:3])
def test_a_parameter_that_never_had_a_gradient_is_resumed(kind: str, dtype: torch.dtype) -> None:
    """Its optimizer state is missing; in checkpoints of older versions, for all kinds of optimizers."""
    train = TrainSection(learning_rate=1e-3)
    updater = Updater(parameters(dtype), train, kind)
    gradients(updater.parameters, 0)
    updater.parameters["b.w"].grad = None
    updater.accumulate()
    updater.step(1e-3, torch.tensor(1.0))
    weights = {name: value.clone() for name, value in updater.weights().items()}
    state = {name: value.clone() for name, value in updater.state().items() if name.startswith("a.w/")}
    resumed = Updater(parameters(dtype), train, kind)
    resumed.load(weights, state, 1)
    gradients(resumed.parameters, 1)
    resumed.accumulate()
    resumed.step(1e-3, torch.tensor(1.0))
    assert all(bool(value.isfinite().all()) for value in resumed.weights().values())
    assert not torch.equal(resumed.weights()["b.w"], weights["b.w"])


def test_the_state_of_8_bit_adamw_is_a_quarter() -> None:
    held = {"w": torch.nn.Parameter(torch.randn(256, 64).bfloat16())}
    updater = Updater(held, TrainSection(), "adamw_8bit")
    held["w"].grad = torch.ones(256, 64, dtype=torch.bfloat16)
    updater.accumulate()
    updater.step(1e-3, torch.tensor(1.0))
    moments = [value for name, value in updater.state().items() if name.endswith(("/state1", "/state2"))]
    assert [value.dtype for value in moments] == [torch.uint8, torch.uint8]
    assert all(value.numel() == held["w"].numel() for value in moments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_moments_move_weights_as_bitsandbytes_does(dtype: torch.dtype) -> None:
    """Tensors that are large enough for 8 bits, each for itself there, of a bf16 model in one here."""
    from bitsandbytes.optim.adamw import AdamW8bit

    def wide() -> dict[str, torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        made = (torch.randn(64, 64 * more, generator=generator).to(dtype) for more in (1, 2))
        return {name: torch.nn.Parameter(one) for name, one in zip(("a.w", "b.w"), made, strict=True)}

    held = wide()
    twins = [torch.nn.Parameter(value.detach().float()) for value in wide().values()]
    train = TrainSection(adam_beta1=0.6, adam_beta2=0.7, weight_decay=0.4, max_grad_norm=1e9)
    updater = Updater(held, train, "adamw_8bit")
    oracle = AdamW8bit(twins, lr=1e-2, betas=(0.6, 0.7), eps=1e-8, weight_decay=0.4)
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        for parameter, twin in zip(held.values(), twins, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            twin.grad = parameter.grad.float()
        updater.accumulate()
        updater.step(1e-2, torch.tensor(1.0))
        oracle.step()
    assert oracle.state[twins[0]]["state1"].dtype == torch.uint8
    for found, twin in zip(updater.weights().values(), twins, strict=True):
        assert torch.allclose(found, twin.detach(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_mean_of_the_weights_follows_them_and_gives_them_back(dtype: torch.dtype) -> None:
    held = parameters(dtype)
    updater = Updater(held, TrainSection(ema_decay=0.9), "adamw_fused_fp32")
    wanted = {name: value.detach().float() for name, value in held.items()}
    for step in range(1, 6):
        gradients(held, step)
        updater.accumulate()
        updater.step(1e-2, torch.tensor(1.0))
        decay = min(0.9, (1 + step) / (10 + step))
        masters = updater.weights()
        wanted = {name: decay * value + (1 - decay) * masters[name].float() for name, value in wanted.items()}
    before = {name: value.detach().clone() for name, value in held.items()}
    with updater.averaged():
        for name, value in held.items():
            assert not torch.equal(value, before[name])
            assert torch.allclose(value.float(), wanted[name].to(dtype).float(), rtol=1e-2, atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in held.items())


def test_the_mean_is_that_of_diffusers_a_step_earlier() -> None:
    """`EMAModel` takes the weights alone in its first step; from there on its decays are ours."""
    make_torchvision_importable()
    from diffusers.training_utils import EMAModel

    values = [torch.zeros(4, 8)]
    ours, theirs = Average(values, 0.75), EMAModel([torch.nn.Parameter(one) for one in values], decay=0.75)
    theirs.optimization_step = 1
    generator = torch.Generator().manual_seed(1)
    for taken in range(1, 41):  # the decay is at its end after 26 steps
        values = [torch.randn(4, 8, generator=generator)]
        ours.update(values, taken)
        theirs.step([torch.nn.Parameter(one) for one in values])
        assert torch.allclose(ours.means[0], theirs.shadow_params[0], atol=1e-6), taken
    assert theirs.cur_decay_value == 0.75


def test_a_scaled_step_in_fp16_is_the_step_itself() -> None:
    """A gradient that fp16 rounds to zero reaches the weights through the scale, an infinite one does not."""
    held = {"w": torch.nn.Parameter(torch.zeros(8, dtype=torch.float16))}
    updater = Updater(held, TrainSection(weight_decay=0.0, max_grad_norm=1e9), "adamw_fused_fp32")
    tiny = 1e-9
    assert torch.tensor(tiny, dtype=torch.float16) == 0
    loss = (held["w"].float() * tiny).sum()
    updater.scaled(loss).backward()
    updater.accumulate()
    norm, fatal = updater.step(1e-2, loss.detach())
    assert norm.item() == pytest.approx(tiny * 8**0.5, rel=1e-2)
    assert fatal.item() == 0.0
    after = updater.weights()["w"].clone()
    assert after.any()
    for overflow in range(1, 18):
        held["w"].grad = torch.full((8,), float("inf"), dtype=torch.float16)
        updater.accumulate()
        _, fatal = updater.step(1e-2, loss.detach())
        assert torch.equal(updater.weights()["w"], after)
        # from 2^16 it takes seventeen halvings to fall below 1
        assert fatal.item() == (1.0 if overflow == 17 else 0.0)


@pytest.mark.parametrize("kind", ["adamw_fused_fp32", "adamw_8bit", "prodigy"])
def test_steps_that_overflow_leave_no_trace_but_a_smaller_scale(kind: str) -> None:
    """Weights, moments, bias correction and mean are those of the other steps alone, also over a resume."""
    train = TrainSection(ema_decay=0.9)

    def run(plan: list[int | None], resume_after: int | None = None) -> Updater:
        """Steps of these seeds, None for one that overflows."""
        held = parameters(torch.float16)
        updater = Updater(held, train, kind)
        for number, seed in enumerate(plan):
            gradients(held, seed or 0)
            for parameter in held.values():
                assert parameter.grad is not None
                scale = updater.state()["loss/scale"].item()
                # powers of two, by which fp16 loses nothing
                parameter.grad.mul_(float("inf") if seed is None else scale / 2.0**16)
            updater.accumulate()
            updater.step(1e-2, torch.tensor(1.0))
            if number == resume_after:
                weights = {name: value.clone() for name, value in updater.weights().items()}
                state = {name: value.clone() for name, value in updater.state().items()}
                held = parameters(torch.float16)
                updater = Updater(held, train, kind)
                updater.load(weights, state, number + 1)
        return updater

    wanted = run([1, 2, 3, 4])
    plan = [None, 1, None, None, 2, 3, None, 4]
    for found in (run(plan), *(run(plan, cut) for cut in range(len(plan)))):
        assert found.steps_taken == len(plan)
        for name, value in wanted.weights().items():
            assert torch.equal(found.weights()[name], value)
        for name, value in wanted.state().items():
            if name == "loss/scale":
                assert found.state()[name].item() == value.item() / 2**4
            elif name != "loss/growth":
                assert torch.equal(found.state()[name], value), name


def test_the_mean_of_a_large_model_is_made_without_a_second_copy_of_it() -> None:
    """A bf16 fine-tune widens one tensor at a time: all at once would take twice the weights."""
    from torch.utils._python_dispatch import TorchDispatchMode

    held = {str(number): torch.nn.Parameter(torch.zeros(1024, dtype=torch.bfloat16)) for number in range(9)}
    average = Average(list(held.values()), 0.9)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            made = func(*args, **(kwargs or {}))
            if torch.is_tensor(made) and made.dtype == torch.float32 and "lerp" not in str(func):
                alive.append(weakref.ref(made))
            most = max(most, sum(one() is not None for one in alive))
            return made

    with Watch():
        average.update(list(held.values()), 1)
    assert 0 < most <= 2
