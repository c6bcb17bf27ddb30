"""The head's cross entropy with gradients made in forward, beside torch's own."""

from __future__ import annotations

import pytest
import torch

from trainer.modeling.fused import head_loss
from trainer.modeling.fused.head_loss import head_losses

TOKENS, WIDTH, WORDS = 37, 24, 101


def made(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, generator=generator).mul_(3).to(dtype).requires_grad_()
    labels = torch.randint(WORDS, (TOKENS,), generator=generator)
    return states, weight, labels, torch.rand(TOKENS, generator=generator) + 0.5


def wanted(
    states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """torch's own, from double precision."""
    logits = states.double() @ weight.double().t()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none") * factors


def difference(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 16, 37, 100])
def test_losses_and_gradients_are_as_near_as_torchs(dtype: torch.dtype, at_once: int) -> None:
    ours, theirs, double = made(dtype), made(dtype), made(dtype)
    losses, exact = head_losses(*ours, at_once=at_once), wanted(*double)
    logits = (theirs[0] @ theirs[1].t()).float()
    plain = torch.nn.functional.cross_entropy(logits, theirs[2], reduction="none") * theirs[3]
    assert losses.dtype == torch.float32
    most = max(1e-6, difference(plain.detach(), exact.detach()))
    assert difference(losses.detach(), exact.detach()) <= most
    for one in (losses, plain, exact):
        (one.sum() / 7).backward()
    for one, other, third in zip(ours[:2], theirs[:2], double[:2], strict=True):
        assert one.grad is not None and other.grad is not None and third.grad is not None
        assert one.grad.dtype == dtype
        # each part's sum is rounded once
        assert difference(one.grad, third.grad) < max(1e-6, 1.3 * difference(other.grad, third.grad))


def test_a_frozen_head_has_no_gradient_and_none_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weight, labels, factors = made(torch.float32)
    other = wanted(states, weight, labels, factors)
    (exact,) = torch.autograd.grad(other.sum(), states)
    monkeypatch.setattr(torch.Tensor, "addmm_", None, raising=False)
    losses = head_losses(states, weight.detach(), labels, factors, at_once=16)
    losses.sum().backward()
    assert states.grad is not None and difference(states.grad, exact) < 1e-6
    assert weight.grad is None


def test_without_gradients_none_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weight, labels, factors = made(torch.float32)
    with torch.no_grad(), monkeypatch.context() as without:
        without.setattr(torch.Tensor, "addmm_", None, raising=False)
        without.setattr(torch, "mm", None)
        losses = head_losses(states, weight, labels, factors, at_once=16)
    assert not losses.requires_grad
    assert difference(losses, wanted(states, weight, labels, factors).detach()) < 1e-6


def test_large_logits_do_not_overflow() -> None:
    states, weight, labels, factors = made(torch.float32)
    with torch.no_grad():
        weight *= 1e3
    losses, exact = (
        function(states, weight, labels, factors)
        for function in (lambda *given: head_losses(*given, at_once=16), wanted)
    )
    assert torch.isfinite(losses).all()
    assert difference(losses.detach(), exact.detach()) < 1e-6


def test_logits_of_few_tokens_exist_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    inner = head_loss._loss_and_gradient

    def counted(logits: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        seen.append(len(logits))
        return inner(logits, *given)

    monkeypatch.setattr(head_loss, "_loss_and_gradient", counted)
    head_losses(*made(torch.float32), at_once=16).sum().backward()
    assert seen == [16, 16, 5], "and not again in backward"


def test_another_gradient_than_a_sums_is_an_error() -> None:
    losses = head_losses(*made(torch.float32), at_once=16)
    with pytest.raises(RuntimeError, match="the same for every token"):
        losses[:10].sum().backward()


def test_no_learned_token_is_no_loss() -> None:
    states, weight, labels, factors = made(torch.float32)
    losses = head_losses(states[:0], weight, labels[:0], factors[:0], at_once=16)
    losses.sum().backward()
    assert weight.grad is not None and not weight.grad.any()
