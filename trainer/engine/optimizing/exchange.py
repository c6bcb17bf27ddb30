"""Sums of gradients over the ranks of a run, equal to the bit to those of one process.

The micro-batches of a step are numbered in the run's order, and micro-batch n belongs to rank n mod N. After
each round of N the ranks exchange slices of their gradients in the gradients' own type. Each rank adds one
slice in the run's order, in fp32, and the slices are gathered once a step: these are the additions of one
process. An all-reduce adds in the order of its algorithm, and sends more bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.engine.optimizing.fp32_masters import FlatGradients
from trainer.engine.ranks import Ranks

# values of a slice are a multiple of it: 32 bytes of the smallest type
_ALIGNMENT = 16


class Exchange:
    """The sum of a step's gradients, of which this rank adds one slice."""

    def __init__(self, ranks: Ranks, gradients: FlatGradients) -> None:
        self.ranks, self.gradients = ranks, gradients
        self._latest = latest = gradients.latest
        each = -(-latest.numel() // (ranks.size * _ALIGNMENT)) * _ALIGNMENT
        self._sent = latest.new_zeros(ranks.size, each)
        self._received = latest.new_zeros(ranks.size, each)
        self._slice = torch.zeros(each, device=latest.device)
        self._gathered = torch.zeros(ranks.size, each, device=latest.device)
        self._total = torch.zeros_like(latest, dtype=torch.float32)
        self._found: set[str] = set()

    def collect(self) -> None:
        """Take the gradients of this rank's micro-batch from its parameters."""
        self._found |= self.gradients.collect()

    @torch.no_grad()
    def add_round(self, count: int) -> None:
        """Add the gradients of a round's first `count` ranks: the others had no micro-batch left."""
        self._sent.view(-1)[: self._latest.numel()] = self._latest
        self.ranks.all_to_all(self._received, self._sent)
        for received in self._received[:count]:
            self._slice.add_(received)

    @torch.no_grad()
    def take(self, total: torch.Tensor) -> None:
        """Write the sum over all micro-batches since the last call to `total` (n,) fp32, on every rank."""
        self.ranks.all_gather(self._gathered, self._slice)
        total.copy_(self._gathered.view(-1)[: total.numel()])
        self.drop()

    def hand_out(self) -> None:
        """Give the sums to the parameters, as their gradients; none to those that have none on any rank."""
        parameters = self.gradients.parameters
        own = torch.tensor([name in self._found for name in parameters], device=self._slice.device)
        found = own.new_zeros(self.ranks.size, len(parameters))
        self.ranks.all_gather(found, own)
        self.take(self._total)
        totals = self.gradients.by_name(self._total)
        for name, has_gradient in zip(parameters, found.any(dim=0).tolist(), strict=True):
            if has_gradient:
                parameters[name].grad = totals[name]

    def drop(self) -> None:
        """Forget what was added."""
        self._slice.zero_()
        self._found.clear()

    def agree(
        self, losses: Sequence[torch.Tensor], count: int, asked: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a step, and the exit code that any rank was asked to end with or 0, on the device.

        `losses` are those of this rank's micro-batches, of `count` in all; they are added in the run's order.
        `asked` is this rank's own code; the largest one is that of all.
        """
        rounds = -(-count // self.ranks.size)
        own = torch.zeros(1 + rounds, device=self._slice.device, dtype=torch.float64)
        own[0] = asked
        for number, loss in enumerate(losses, start=1):
            own[number] = loss
        by_rank = own.new_zeros(self.ranks.size, 1 + rounds)
        self.ranks.all_gather(by_rank, own)
        total = torch.zeros((), device=own.device, dtype=own.dtype)
        for loss in by_rank[:, 1:].T.reshape(-1)[:count]:
            total += loss
        return total, by_rank[:, 0].max()
