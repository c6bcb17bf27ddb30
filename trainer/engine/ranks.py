"""The processes that train one run together, the ranks: this process's place, and what they tell each other.

Nothing here is called in a forward or backward pass: ranks may disagree on shapes, compile, skip and be slow,
and meet at the ends of micro-batches and phases only.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from trainer.errors import PeerLostError
from trainer.telemetry.status import StatusWriter

Item = TypeVar("Item")
_TIMEOUT = datetime.timedelta(hours=2)
"""Twice the longest budget of a phase: the supervisor's verdict comes before that of a library."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The place of this process among those of its run; of one process no method waits for anybody."""

    rank: int = 0
    size: int = 1
    status: StatusWriter | None = None
    """Where this process says that it waits; None for nowhere."""

    @property
    def first(self) -> bool:
        """True for the process that writes the run's files."""
        return self.rank == 0

    def from_first(self, make: Callable[[], Item]) -> Item:
        """The value that `make` gives on rank 0, on every rank; it can be pickled."""
        if self.size == 1:
            return make()
        held = [make() if self.first else None]
        with self.waiting():
            dist.broadcast_object_list(held, src=0)
        return held[0]  # type: ignore[return-value]  # rank 0's

    def gathered(self, value: Item) -> list[Item]:
        """The value of every rank, in their order; it can be pickled."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        with self.waiting():
            dist.all_gather_object(values, value)
        return values

    def meet(self) -> None:
        """Wait until every rank is here."""
        self.gathered(None)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Give row j of `sent` (ranks, n) to rank j; row r of `received` is what rank r gave."""
        with self.waiting():
            dist.all_to_all_single(received, sent)

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        """Write `own` (n,) of every rank, in their order, to `gathered` (ranks * n,)."""
        # torch 2.11 has the second name only, which 2.13 warns of
        named = vars(dist)
        gather = named.get("all_gather_single") or named["all_gather_into_tensor"]
        with self.waiting():
            gather(gathered, own)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Say meanwhile that this process waits; turns a library's word on a lost connection to a
        PeerLostError.
        """
        if self.status is not None:
            self.status.wait()
        try:
            yield
        except RuntimeError as error:  # gloo's and NCCL's own errors are of this class
            raise PeerLostError(str(error)) from error


ALONE = Ranks()
"""The one process of a run."""


@contextlib.contextmanager
def joined(rank: int, size: int, meeting_place: Path, status: StatusWriter | None = None) -> Iterator[Ranks]:
    """Meet the other ranks of this host through a file that nobody made before, for the time of the block.

    At its end every rank waits for the others; after an error none does.
    """
    ranks = Ranks(rank=rank, size=size, status=status)
    if size == 1:
        yield ranks
        return
    with ranks.waiting():
        place = f"file://{meeting_place}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size, timeout=_TIMEOUT)
    yield ranks
    ranks.meet()
    dist.destroy_process_group()
