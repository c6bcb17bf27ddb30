"""AdamW with split masters beside torch's fp32 AdamW: weights, moments, decay, formats, old checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import optimi
import pytest
import torch

from trainer.config.schema import TrainSection
from trainer.engine.optimizing.one_launch import parts_of
from trainer.engine.optimizing.optimizers import build_split
from trainer.engine.optimizing.split_adamw import (
    decoded_first,
    decoded_second,
    encoded_first,
    encoded_second,
    joined,
    noise,
    rounded,
    seed_of,
    split,
)
from trainer.engine.optimizing.updater import Updater

SIZE = 16 * 1024
RATE = 1e-5
KIND, STOCHASTIC = "adamw_split_bf16", "adamw_stochastic_bf16"
Gradients = Callable[[int], torch.Tensor]


def noisy(scale: float = 1e-3, seed: int = 0) -> Gradients:
    """Gradients with a part that stays and a part of chance, as bf16 has them."""
    generator = torch.Generator().manual_seed(seed)
    stays = torch.randn(SIZE, generator=generator)

    def gradient(step: int) -> torch.Tensor:
        chance = torch.Generator().manual_seed(1000 + step)
        return (scale * (0.3 * stays + torch.randn(SIZE, generator=chance))).bfloat16()

    return gradient


class Beside:
    """A bf16 parameter that our optimizer trains, and its fp32 twin that torch's does."""

    def __init__(
        self, *, beta_2: float = 0.999, decay: float = 0.0, start: float = 0.02, kind: str = KIND
    ) -> None:
        self.start = (start * torch.randn(SIZE, generator=torch.Generator().manual_seed(9))).bfloat16()
        self.held = {"w": torch.nn.Parameter(self.start.clone())}
        self.twin = torch.nn.Parameter(self.start.float())
        train = TrainSection(adam_beta2=beta_2, weight_decay=decay, max_grad_norm=1e9)
        self.updater = Updater(self.held, train, kind)
        self.oracle = torch.optim.AdamW([self.twin], lr=RATE, betas=(0.9, beta_2), weight_decay=decay)

    def step(self, gradient: torch.Tensor, rate: float = RATE) -> None:
        self.held["w"].grad, self.twin.grad = gradient, gradient.float()
        self.oracle.param_groups[0]["lr"] = rate
        self.updater.accumulate()
        self.updater.step(rate, torch.tensor(1.0))
        self.oracle.step()

    @property
    def master(self) -> torch.Tensor:
        return joined(self.held["w"].detach(), self.updater.state()["w/low"])

    @property
    def error(self) -> float:
        """Of the whole update, relative to it."""
        wanted = self.twin.detach()
        return float((self.master - wanted).norm() / (wanted - self.start.float()).norm())


@pytest.mark.parametrize("beta_2", [0.99, 0.999])
def test_weights_are_those_of_fp32_after_fifty_steps(beta_2: float) -> None:
    both, gradient = Beside(beta_2=beta_2, decay=0.01), noisy()
    for step in range(50):
        both.step(gradient(step))
    assert both.error < 2e-3
    assert (both.held["w"].detach() != both.master.bfloat16()).float().mean() < 1e-3  # of two as near


def test_the_second_moment_follows_gradients_that_fall_tenfold() -> None:
    both, large, small = Beside(), noisy(1e-3), noisy(1e-4)
    for step in range(900):
        both.step((large if step < 150 else small)(step))
    wanted = both.oracle.state[both.twin]["exp_avg_sq"]
    found = decoded_second(both.updater.state()["w/exp_avg_sq"])
    assert found.mean().item() == pytest.approx(wanted.mean().item(), rel=0.01)
    assert (found.log() - wanted.log()).abs().median().item() < 0.02


def test_weights_decay_as_those_of_fp32() -> None:
    """Each step takes 1e-4 of a weight, which bf16 cannot tell."""
    both, none = Beside(decay=0.1), torch.zeros(SIZE, dtype=torch.bfloat16)
    for _ in range(500):
        both.step(none, rate=1e-3)
    shrunk = (both.master.norm() / both.start.float().norm()).item()
    wanted = (both.twin.detach().norm() / both.start.float().norm()).item()
    assert wanted == pytest.approx((1 - 1e-4) ** 500, rel=1e-3)
    assert 1 - shrunk == pytest.approx(1 - wanted, rel=0.01)


def test_clipping_is_part_of_the_step() -> None:
    held = {"w": torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))}
    twin = torch.nn.Parameter(torch.zeros(4))
    updater = Updater(held, TrainSection(max_grad_norm=1.0, weight_decay=0.0), KIND)
    oracle = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.0)
    for gradient in (torch.tensor([30.0, 40.0, 0.0, 0.0]), torch.tensor([0.25, 0.0, 0.5, 0.0])):
        held["w"].grad, twin.grad = gradient.bfloat16(), gradient.clone()
        torch.nn.utils.clip_grad_norm_([twin], 1.0)
        updater.accumulate()
        norm, _ = updater.step(0.1, torch.tensor(1.0))
        assert norm.item() == gradient.norm().item()
        oracle.step()
    master = joined(held["w"].detach(), updater.state()["w/low"])
    assert torch.allclose(master, twin.detach(), rtol=3e-3)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> Iterator[torch.Tensor]:
        both, gradient = Beside(), noisy()
        for step in range(3):
            both.step(gradient(step))
        yield from both.updater.state().values()
        yield both.held["w"].detach()

    whole = list(trained())
    monkeypatch.setattr("trainer.engine.optimizing.split_adamw._CHUNK", 1000)
    assert all(torch.equal(one, other) for one, other in zip(trained(), whole, strict=True))


def test_a_gradient_that_lies_otherwise() -> None:
    start = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = []
    for turned in (False, True):
        held = {"w": torch.nn.Parameter(start.clone())}
        updater = Updater(held, TrainSection(), KIND)
        gradient = torch.arange(48.0).reshape(8, 6).bfloat16()
        held["w"].grad = gradient.t().contiguous().t() if turned else gradient
        updater.step(1e-3, torch.tensor(1.0))
        weights.append(held["w"].detach().clone())
    assert torch.equal(*weights)


# ---- formats


def spread(count: int = 50_000) -> torch.Tensor:
    """Values of both signs over the exponents that a moment may have."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return signs * (1 + torch.rand(count, generator=generator)) * torch.logspace(-14, 3, count)


def test_halves_join_to_the_bit() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.00390625, 3.0e38, -1e-40, 2.0**-126])
    for values in (spread(), special):
        weight, low = split(values)
        assert torch.equal(joined(weight, low).view(torch.int32), values.view(torch.int32))
    weight, _ = split(spread())
    assert (weight != spread().bfloat16()).float().mean() < 1e-3  # of two that are as near


def test_moments_have_nine_bits_and_the_right_mean() -> None:
    values, generator = spread(4000), torch.Generator().manual_seed(1)

    def noise() -> torch.Tensor:
        return torch.randint(0, 2**14, values.shape, generator=generator)

    for encode, decode, wanted in (
        (encoded_first, decoded_first, values),
        (encoded_second, decoded_second, values.square()),
    ):
        found = torch.stack([decode(encode(wanted, noise())) for _ in range(400)])
        assert ((found - wanted) / wanted).abs().max() < 2.0**-9
        assert ((found.double().mean(0) - wanted) / wanted).abs().mean() < 1e-4
        # a value that has nine bits is kept whatever chance says
        again = found[0]
        assert torch.equal(decode(encode(again, noise())), again)


def test_moments_outside_of_their_exponents() -> None:
    none = torch.zeros(4, dtype=torch.int64)
    values = torch.tensor([0.0, 1e-30, 1e9, -1e9])
    first = decoded_first(encoded_first(values, none))
    assert first[:2].tolist() == [0.0, 0.0]
    assert first[2] == -first[3] and 4000 < first[2] < 4096
    second = decoded_second(encoded_second(torch.tensor([0.0, 1e-38, 1e7, 1e30]), none))
    assert second[:2].tolist() == [0.0, 0.0]
    assert second[2].item() == pytest.approx(1e7, rel=2.0**-9) and 1e8 < second[3] < 2**28


def test_chance_differs_by_step_tensor_and_place() -> None:
    places = torch.arange(100_000)
    one = noise(seed_of(1, 0), places)
    assert torch.equal(noise(seed_of(1, 0), places), one)
    assert torch.equal(noise(seed_of(1, 0), places[60_000:]), one[60_000:])
    for other in (noise(seed_of(2, 0), places), noise(seed_of(1, 1), places), one.flip(0)):
        for low in (0, 16):
            parts = torch.stack([(each >> low & 0x3FFF).double() for each in (one, other)])
            assert torch.corrcoef(parts)[0, 1].abs() < 0.02
            assert parts.mean(1).sub(2**13).abs().max() < 60
    halves = torch.stack([(one & 0x3FFF).double(), (one >> 16 & 0x3FFF).double()])
    assert torch.corrcoef(halves)[0, 1].abs() < 0.02


def lowbias32(word: int) -> int:
    """The hash of 32 bits as published: nullprogram.com/blog/2018/07/31."""
    word ^= word >> 16
    word = word * 0x7FEB352D % 2**32
    word ^= word >> 15
    word = word * 0x846CA68B % 2**32
    return word ^ word >> 16


def test_chance_is_the_published_hash() -> None:
    """A run that goes on has the bits of one that was never stopped, also where another version goes on."""
    for step, place in ((1, 0), (1, 1), (7, 3), (2**20, 999)):
        seed = seed_of(step, place)
        assert seed == lowbias32((step * 0x9E3779B1 + place * 0x85EBCA77) % 2**32)
        places = [0, 1, 12_345, 2**31, 2**32 - 1, 2**32 + 5]
        wanted = [lowbias32(one % 2**32 ^ seed) for one in places]
        assert noise(seed, torch.tensor(places)).tolist() == wanted


# ---- without masters


def test_weights_without_masters_move_as_those_of_fp32_in_the_mean() -> None:
    """Each step is a tenth of the distance between two numbers: rounded to the nearest none would move."""
    both, gradient = Beside(kind=STOCHASTIC, decay=0.01), noisy()
    for step in range(50):
        both.step(gradient(step))
    assert both.updater.state().keys() == {"w/exp_avg", "w/exp_avg_sq"}
    wanted = both.twin.detach() - both.start.float()
    moved = both.held["w"].detach().float() - both.start.float()
    assert float(moved @ wanted / (wanted @ wanted)) == pytest.approx(1.0, abs=0.02)
    found = decoded_second(both.updater.state()["w/exp_avg_sq"])
    assert found.mean().item() == pytest.approx(
        both.oracle.state[both.twin]["exp_avg_sq"].mean().item(), rel=0.01
    )


def test_weights_without_masters_decay() -> None:
    both, none = Beside(kind=STOCHASTIC, decay=0.1), torch.zeros(SIZE, dtype=torch.bfloat16)
    for _ in range(500):
        both.step(none, rate=1e-3)
    shrunk = float(
        both.held["w"].detach().float() @ both.start.float() / (both.start.float() @ both.start.float())
    )
    assert 1 - shrunk == pytest.approx(1 - (1 - 1e-4) ** 500, rel=0.02)


def test_rounding_by_chance_keeps_bf16_numbers_and_the_mean_of_others() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    for chance in (0, 1, 0xFFFF):
        assert torch.equal(rounded(numbers.float(), torch.full((1000,), chance)), numbers)
    for value in (1.001, -1.001, 3e-20):
        found = rounded(torch.full((2**16,), value), torch.arange(2**16)).double()
        assert found.mean().item() == pytest.approx(value, rel=1e-6)
        assert len(found.unique()) == 2


# ---- checkpoints of the optimizer before


@pytest.mark.parametrize("settings", [{"adam_beta2": 0.99, "weight_decay": 0.0}, {}], ids=["its", "usual"])
def test_a_checkpoint_with_compensated_sums_goes_on(settings: dict[str, float]) -> None:
    """Beside fp32 AdamW that saw all gradients; optimi's own AdamW made the checkpoint."""
    gradient, start = noisy(), Beside().start
    beta_2, decay = settings.get("adam_beta2", 0.999), settings.get("weight_decay", 0.01)
    twin = torch.nn.Parameter(start.float())
    oracle = torch.optim.AdamW([twin], lr=RATE, betas=(0.9, beta_2), weight_decay=decay)
    held = {"w": torch.nn.Parameter(start.clone()), "wide": torch.nn.Parameter(start[:100].float())}
    betas = (0.9, beta_2)
    old = optimi.AdamW(held.values(), RATE, betas, decay, eps=1e-8, kahan_sum=True, triton=False)
    wide = torch.nn.Parameter(start[:100].float())  # what a bf16 model keeps in fp32
    beside = torch.optim.AdamW([wide], lr=RATE, betas=(0.9, beta_2), weight_decay=decay)

    def give(parameters: dict[str, torch.nn.Parameter], number: int) -> None:
        parameters["w"].grad, twin.grad = gradient(number), gradient(number).float()
        parameters["wide"].grad, wide.grad = gradient(number)[:100].float(), gradient(number)[:100].float()
        oracle.step()
        beside.step()

    for number in range(20):
        give(held, number)
        old.step()
    weights = {name: one.detach().clone() for name, one in held.items()}
    state = {
        f"{name}/{key}": value.clone()
        for name, one in held.items()
        for key, value in old.state[one].items()
        if torch.is_tensor(value)
    }
    moments = {f"{name}/{key}" for name in held for key in ("exp_avg", "exp_avg_sq")}
    assert state.keys() == {*moments, "w/kahan_comp"}  # fp32 has no compensation
    exact = weights["w"].float() + state["w/kahan_comp"].float()

    gone_on = {"w": torch.zeros_like(start), "wide": torch.zeros(100)}
    gone_on = {name: torch.nn.Parameter(one) for name, one in gone_on.items()}
    updater = Updater(gone_on, TrainSection(max_grad_norm=1e9, **settings), KIND)
    updater.load(weights, state, 20)
    assert torch.equal(joined(gone_on["w"].detach(), updater.state()["w/low"]), exact)
    wanted, found = (
        oracle.state[twin]["exp_avg_sq"].mean(),
        decoded_second(updater.state()["w/exp_avg_sq"]).mean(),
    )
    assert found.item() == pytest.approx(wanted.item(), rel=0.02)  # the old one's decay was 0.99
    before = twin.detach().clone()
    for number in range(20, 40):
        give(gone_on, number)
        updater.accumulate()
        updater.step(RATE, torch.tensor(1.0))
    moved, wanted_move = (
        joined(gone_on["w"].detach(), updater.state()["w/low"]) - exact,
        twin.detach() - before,
    )
    assert (moved - wanted_move).norm() / wanted_move.norm() < 0.02
    torch.testing.assert_close(gone_on["wide"], wide, rtol=0.0, atol=0.03 * 20 * RATE)


@pytest.mark.parametrize("kind", [KIND, STOCHASTIC])
def test_rows_of_a_tensor_have_the_bits_that_they_have_in_the_whole(kind: str) -> None:
    """Chance goes by the place in the whole tensor, however many ranks share it."""
    values = torch.randn(9, 7, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = [torch.randn(9, 7, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (2, 3)]

    def trained(start: int, stop: int) -> dict[str, torch.Tensor]:
        own = {"w": torch.nn.Parameter(values[start:stop].clone())}
        optimizer = build_split(kind, own, TrainSection(), {"w": start * 7})
        for number, gradient in enumerate(gradients, start=1):
            own["w"].grad = gradient[start:stop]
            optimizer.step(1e-3, number, torch.ones(()), torch.zeros(()))
        return {"w": own["w"].detach(), **optimizer.state()}

    whole, parts = trained(0, 9), [trained(0, 4), trained(4, 8), trained(8, 9), trained(9, 9)]
    assert whole.keys() == {"w", "w/exp_avg", "w/exp_avg_sq", *(["w/low"] if kind == KIND else [])}
    for name, wanted in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), wanted)


def test_programs_take_parts_of_parameters_in_turn() -> None:
    parts = parts_of([1, 4096, 4097, 9000], 4096)
    assert parts.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2]]
    assert parts.dtype == torch.int32
