"""Sums of gradients over the ranks of a run, equal to the bit to those of one process.

The micro-batches of a step are numbered in the run's order, and micro-batch n belongs to rank n mod N. After
each round of N the ranks exchange slices of their gradients in the gradients' own type. Each rank adds one
slice in the run's order, in fp32, and the slices are gathered once a step: these are the additions of one
process. An all-reduce adds in the order of its algorithm, and sends more bytes.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.engine.optimizing.fp32_masters import FlatGradients
from trainer.engine.ranks import Ranks

# values of a slice are a multiple of it: 32 bytes of the smallest type
_ALIGNMENT = 16
# what a rank says of itself before its losses
_WORDS = 5
_SLOW, _SLOW_STEPS = 1.5, 20


@dataclass(frozen=True, kw_only=True)
class Told:
    """Answers of all ranks to each other at the end of a step."""

    asked: int
    """The largest exit code that one was asked to end with; 0 for none."""
    unequal: bool
    """Whether the weights of some differ."""
    orders: int
    """Bits of what rank 0 was asked to do between two steps."""
    computed: float
    """Seconds of the last step's forward and backward passes on the rank where they took longest."""
    seconds: tuple[float, ...]
    """Time of a sample of the last step on each, forward and backward; 0 where it had none."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Told:
        """The second of what `agree` gives, once it is on the host."""
        asked, unequal, orders, computed, *seconds = values
        return cls(
            asked=int(asked),
            unequal=bool(unequal),
            orders=int(orders),
            computed=computed,
            seconds=tuple(seconds),
        )


class SlowRanks:
    """Names a rank that takes clearly longer than the others, step after step; each once."""

    def __init__(self) -> None:
        self._steps: Counter[int] = Counter()
        """Steps on end in which a rank was slow."""
        self._named: set[int] = set()

    def look(self, seconds: Sequence[float]) -> str:
        """Take in the times of a sample; gives a line for people, empty where there is nothing to tell."""
        lines = []
        for rank, own in enumerate(seconds):
            others = statistics.median([*seconds[:rank], *seconds[rank + 1 :]])
            slow = min(seconds) > 0.0 and own > _SLOW * others
            self._steps[rank] = self._steps[rank] + 1 if slow else 0
            if self._steps[rank] == _SLOW_STEPS and rank not in self._named:
                self._named.add(rank)
                times = f"{own / others:.1f} times as long as the others"
                figures = f"{1e3 * own:.0f} against {1e3 * others:.0f} ms a sample"
                look = "look at its clocks, its cooling and other processes"
                lines.append(f"rank {rank} takes {times}, {figures}: {look}")
        return "; ".join(lines)


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
        self._numbers = {name: number for number, name in enumerate(gradients.parameters)}
        self._found = torch.zeros(len(self._numbers), device=latest.device, dtype=torch.bool)

    def collect(self) -> None:
        """Take the gradients of this rank's micro-batch from its parameters; fit for a CUDA graph."""
        found = self.gradients.collect()
        if len(found) == len(self._numbers):
            self._found.fill_(True)
        else:
            for name in found:
                self._found[self._numbers[name]].fill_(True)

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
        found = self._found.new_zeros(self.ranks.size, len(self._numbers))
        self.ranks.all_gather(found, self._found)
        total = torch.empty_like(self._latest, dtype=torch.float32)
        self.take(total)
        totals, on_any = self.gradients.by_name(total), found.any(dim=0).tolist()
        for name, number in self._numbers.items():
            if on_any[number]:
                self.gradients.parameters[name].grad = totals[name]

    def drop(self) -> None:
        """Forget what was added."""
        self._slice.zero_()
        self._found.fill_(False)


def agree(
    ranks: Ranks,
    losses: Sequence[torch.Tensor],
    count: int,
    *,
    asked: int,
    orders: int,
    computed: float,
    seconds: float,
    digest: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a step, and what all ranks say of themselves, for `Told.of`; on the device, in float64.

    `losses` are those of this rank's micro-batches, of `count` in all; they are added in the run's order.
    `asked` is the exit code that this rank was asked to end with or 0, `orders` 0 on all ranks but the first,
    `computed` and `seconds` as in `Told`, of this rank, `digest` a scalar on the device that is equal on all
    ranks whose weights are.
    """
    rounds = -(-count // ranks.size)
    own = torch.zeros(_WORDS + rounds, device=digest.device, dtype=torch.float64)
    own[0], own[1], own[2], own[3], own[4] = asked, computed, seconds, digest, orders
    for number, loss in enumerate(losses, start=_WORDS):
        own[number] = loss
    by_rank = own.new_zeros(ranks.size, _WORDS + rounds)
    ranks.all_gather(by_rank, own)
    total = torch.zeros((), device=own.device, dtype=own.dtype)
    for loss in by_rank[:, _WORDS:].T.reshape(-1)[:count]:
        total += loss
    unequal = (by_rank[:, 3] != by_rank[0, 3]).any().to(own.dtype)
    most = by_rank.amax(dim=0)
    return total, torch.cat([most[:1], unequal[None], by_rank[:1, 4], most[1:2], by_rank[:, 2]])
