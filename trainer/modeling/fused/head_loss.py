"""Cross entropy of a language model's head, whose gradients are made in the forward pass.

Logits are the largest tensors of such a model: tokens x words of the vocabulary. They exist for a part of the
tokens at a time, and once: what backward needs of them is their gradient, which needs no more than they do.
Computing them again for it costs a product more, of as many values as all layers' inputs together.

    logits    = states @ weight.T                      a part of the tokens
    loss      = w * (log sum exp(logits) - logits[label])
    gradient  = w * (softmax(logits) - one at the label), in the states' type, in the logits' memory
    d states  = gradient @ weight
    d weight += gradient.T @ states                    where the head trains
"""

from __future__ import annotations

from typing import Any

import torch

_SCALED_ROWS = 8192
"""Rows of a gradient that are multiplied at a time: they exist in fp32 meanwhile."""


def head_losses(
    states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, factors: torch.Tensor, *, at_once: int
) -> torch.Tensor:
    """Cross entropies in fp32 of states (N, D) through a head (V, D), times `factors` (N,) fp32: (N,).

    Logits of `at_once` tokens exist at one time. Backward wants the same gradient for every token, as that of
    a sum has: the head's own gradient is summed over tokens before it is known. Another one is an error.
    """
    if not torch.is_grad_enabled():  # what is asked for its gradient is not told so
        states, weight = states.detach(), weight.detach()
    result: torch.Tensor = _HeadLosses.apply(states, weight, labels, factors, at_once)
    return result


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        factors: torch.Tensor,
        at_once: int,
    ) -> torch.Tensor:
        of_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        losses = torch.empty_like(factors)
        for first in range(0, len(states), at_once):
            part = slice(first, first + at_once)
            rows = states[part]
            logits = rows @ weight.t()
            losses[part] = _loss_and_gradient(logits, labels[part], factors[part])
            if of_states is not None:
                torch.mm(logits, weight, out=of_states[part])
            if of_weight is not None:
                of_weight.addmm_(logits.t(), rows)
        ctx.save_for_backward(of_states, of_weight)
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_states, of_weight = ctx.saved_tensors
        if not len(upstream):
            return of_states, of_weight, None, None, None
        one = upstream[0]
        # what is not a number is for the step's own check
        alike = (upstream == one) | upstream.isnan() | one.isnan()
        torch._assert_async(alike.all(), "the gradient of a sum is the same for every token")
        for gradient in (of_states, of_weight):
            for rows in () if gradient is None else gradient.split(_SCALED_ROWS):
                # in fp32: in a narrower type the factor itself would be rounded
                rows.copy_(rows.float() * one)
        return of_states, of_weight, None, None, None


def _loss_and_gradient(logits: torch.Tensor, labels: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Losses (n,) of logits (n, V), times `factors`; the logits become their gradient, in place."""
    wide, places = logits.float(), labels[:, None]
    largest = wide.amax(dim=-1, keepdim=True)
    at_label = wide.gather(1, places) - largest
    exponents = wide.sub_(largest).exp_()  # in fp32 these are the logits' own memory
    total = exponents.sum(dim=-1, keepdim=True)
    exponents.mul_(factors[:, None] / total)
    exponents.scatter_add_(1, places, -factors[:, None])
    logits.copy_(exponents)
    return (total.log() - at_label)[:, 0] * factors
