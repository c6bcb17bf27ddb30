"""Trained layers in FP8 beside fp32: exact where FP8 is, near elsewhere, and learning the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.modeling.storage.fp8_gradient import quantize_gradient
from trainer.modeling.storage.fp8_trained import Fp8TrainedLinear, WeightGradient, refresh_weights

WAYS: tuple[WeightGradient, ...] = ("fp8", "bf16")
TOKENS, IN, OUT = 48, 32, 64


def whole(*shape: int, seed: int) -> torch.Tensor:
    """Whole numbers from -7 to 7, the largest in every row and column: e4m3 holds each of them exactly."""
    values = torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(seed)).float()
    rows, columns = shape
    for number in range(max(shape)):
        values[number % rows, number % columns] = 7.0
    return values


def layer(weight: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> Fp8TrainedLinear:
    plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    plain.weight = torch.nn.Parameter(weight.clone())
    if bias is not None:
        plain.bias = torch.nn.Parameter(bias.clone())
    one = Fp8TrainedLinear(plain, **options)
    one.refresh()
    return one


def passes(module: torch.nn.Module, inputs: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of inputs and parameters."""
    given = inputs.clone().requires_grad_()
    output = module(given)
    output.backward(gradient)
    assert given.grad is not None
    return [output.detach(), given.grad, *(one.grad for one in module.parameters() if one.grad is not None)]


def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    one = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        one.weight.copy_(weight)
        if bias is not None:
            one.bias.copy_(bias)
    return one


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("with_bias", [True, False])
def test_what_fp8_holds_is_multiplied_exactly(way: WeightGradient, copies: int, with_bias: bool) -> None:
    weight, inputs, gradient = whole(OUT, IN, seed=0), whole(TOKENS, IN, seed=1), whole(TOKENS, OUT, seed=2)
    bias = torch.arange(OUT).float() if with_bias else None
    found = passes(layer(weight, bias, copies=copies, weight_gradient=way), inputs, gradient)
    wanted = passes(plain(weight, bias), inputs, gradient)
    assert len(found) == len(wanted) == 3 + with_bias
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_that_of_three_bits(way: WeightGradient, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    # tokens differ in size, and so do gradients, by orders of magnitude
    sizes = torch.logspace(-3, 1, 96).to(dtype)[:, None]
    inputs = drawn(96, 128, scale=1.0) * sizes
    gradient = drawn(96, 64, scale=1e-6) * sizes.flip(0)
    weight, bias = drawn(64, 128, scale=0.02), drawn(64, scale=0.1)
    found = passes(layer(weight, bias, weight_gradient=way), inputs, gradient)
    wanted = passes(plain(weight.float(), bias.float()), inputs.float(), gradient.float())
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        assert (one.float() - other).norm() / other.norm() < 0.045
        assert torch.cosine_similarity(one.float().flatten(), other.flatten(), dim=0) > 0.999


def test_tokens_in_batches_are_rows() -> None:
    weight, inputs, gradient = whole(OUT, IN, seed=0), whole(TOKENS, IN, seed=1), whole(TOKENS, OUT, seed=2)
    flat = passes(layer(weight, None), inputs, gradient)
    batched = passes(layer(weight, None), inputs.view(2, -1, IN), gradient.view(2, -1, OUT))
    assert batched[0].shape == (2, TOKENS // 2, OUT)
    for one, other in zip(batched, flat, strict=True):
        assert torch.equal(one.reshape(other.shape), other)


def test_a_gradient_is_scaled_and_quantised_both_ways() -> None:
    """Whole numbers times powers of two, the largest in each row and column: nothing is rounded."""
    gradient = whole(TOKENS, OUT, seed=0)
    across, down = 2.0 ** -torch.arange(OUT).fmod(3), 2.0 ** -torch.arange(TOKENS + 4).fmod(3)
    gradient[:, 0], gradient[0] = 7.0, 7.0
    found = quantize_gradient(gradient, across, down[:, None], with_sums=True)
    assert torch.equal(found.values.float() * found.scale, gradient * across)
    assert torch.equal(found.turned.float() * found.turned_scale, (gradient * down[:TOKENS, None]).t())
    assert torch.equal(found.scale, torch.full((TOKENS, 1), 7.0) / 448.0)
    assert torch.equal(found.sums, gradient.sum(0))
    alone = quantize_gradient(gradient, None, down[:, None], with_sums=False)
    assert torch.equal(alone.turned.view(torch.uint8), found.turned.view(torch.uint8))
    assert alone.values.shape == (0, OUT) and alone.sums.shape == (0,)


@pytest.mark.parametrize("where", ["inputs", "gradient"])
def test_what_is_not_finite_is_seen(where: str) -> None:
    given = {"inputs": whole(TOKENS, IN, seed=1), "gradient": whole(TOKENS, OUT, seed=2)}
    given[where][5, 3] = float("nan")
    _, _, of_weight = passes(layer(whole(OUT, IN, seed=0), None), given["inputs"], given["gradient"])
    assert not of_weight.isfinite().all()


def test_what_draws_is_the_weight_itself() -> None:
    weight, inputs = torch.randn(OUT, IN), torch.randn(TOKENS, IN)
    one = layer(weight, None)
    wanted = torch.nn.functional.linear(inputs, weight)
    assert not torch.equal(one(inputs), wanted)
    assert torch.equal(one.eval()(inputs), wanted)
    assert set(one.state_dict()) == {"weight"}


def test_refreshing_follows_the_weight_and_stays_in_its_place() -> None:
    one, other = layer(whole(OUT, IN, seed=0), None), whole(OUT, IN, seed=9)
    held = [one.values, one.scale, one.transposed]
    inputs = whole(TOKENS, IN, seed=1)
    before = one(inputs)
    with torch.no_grad():
        one.weight.copy_(other)
    assert torch.equal(one(inputs), before)
    assert refresh_weights(torch.nn.Sequential(one, torch.nn.ReLU())) == 1
    assert torch.equal(one(inputs), torch.nn.functional.linear(inputs, other))
    assert all(a is b for a, b in zip((one.values, one.scale, one.transposed), held, strict=True))


def test_sides_that_tensor_cores_do_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 16, not 24 x 64"):
        Fp8TrainedLinear(torch.nn.Linear(24, 64))


def test_frozen_parts_get_no_gradient() -> None:
    one = layer(whole(OUT, IN, seed=0), torch.zeros(OUT))
    one.weight.requires_grad_(False)
    inputs = whole(TOKENS, IN, seed=1).requires_grad_()
    one(inputs).sum().backward()
    assert one.weight.grad is None and one.bias.grad is not None and inputs.grad is not None
    one.weight.requires_grad_(True)
    one(inputs.detach()).sum().backward()
    assert one.weight.grad is not None


@pytest.mark.parametrize("way", WAYS)
def test_a_small_network_learns_what_it_learns_in_fp32(way: WeightGradient) -> None:
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(64, 64, generator=generator) / 8

    def network() -> torch.nn.Sequential:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))

    def judged(model: torch.nn.Sequential) -> float:
        """The loss on inputs that it has not seen, of the weights themselves."""

        def loss_of(seed: int) -> torch.Tensor:
            inputs = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed))
            return (model(inputs) - (inputs @ teacher).tanh()).square().mean()

        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(300):
            refresh_weights(model)
            optimizer.zero_grad()
            loss_of(step).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            return sum(loss_of(step).item() for step in range(300, 350)) / 50

    narrow = network()
    for number in (0, 2):
        narrow[number] = Fp8TrainedLinear(narrow[number], weight_gradient=way)
    wide = judged(network())
    assert wide < 0.05, "of 0.35, which an output of zeros would have"
    assert judged(narrow) == pytest.approx(wide, rel=0.01)
