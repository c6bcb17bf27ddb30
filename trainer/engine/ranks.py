"""The processes that train one run together, the ranks: this process's place, and what they tell each other.

Nothing here is called in a forward or backward pass: ranks may disagree on shapes, compile, skip and be slow,
and meet at the ends of micro-batches and phases only.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.engine.meeting.lifeline import GO_ON, Lifeline
from trainer.engine.meeting.meeting import Meeting, connected, met
from trainer.engine.waits import Waits
from trainer.errors import EndedTogether, HardwareError, LostError, PeerLostError, StoppedError, TrainerError
from trainer.planning.out_of_memory import is_out_of_memory
from trainer.telemetry.status import StatusWriter

Item = TypeVar("Item")
_TIMEOUT = datetime.timedelta(weeks=3)
"""Longer than any phase: it is the supervisor that judges who is silent, not a library."""
_LOOK_SECONDS = 0.05
_ELSEWHERE_SECONDS = 10.0
"""Longest time from a broken connection to the end of this process, where several hosts train."""
PIECE_BYTES = 64 * 2**20
"""Most that travels between hosts in one piece, in bytes of all ranks together."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The place of this process among those of its run; of one process no method waits for anybody."""

    rank: int = 0
    size: int = 1
    hosts: int = 1
    """Machines of the ranks: each has as many, in their order."""
    waits: Waits | None = None
    """Where this process says that it waits; None for nowhere."""
    host_group: dist.ProcessGroup | None = None
    """The ranks of this host among several hosts; None where they are all."""
    lifeline: Lifeline | None = None
    """Notices that another host is lost; None for one host."""

    @property
    def first(self) -> bool:
        """True for the process that writes the run's files."""
        return self.rank == 0

    @property
    def ranks_here(self) -> int:
        """Ranks of each host."""
        return self.size // self.hosts

    @property
    def host(self) -> int:
        """Number of this process's host."""
        return self.rank // self.ranks_here

    @property
    def local_rank(self) -> int:
        """The place of this process among those of its host."""
        return self.rank % self.ranks_here

    @property
    def speaks(self) -> bool:
        """True for the process that speaks for its host."""
        return self.local_rank == 0

    def part(self) -> None:
        """Look no more for lost hosts: all ranks are about to end, each when it is done."""
        if self.lifeline is not None:
            self.lifeline.end()

    def from_first(self, value: Item) -> Item:
        """The value of rank 0, on every rank; it can be pickled."""
        if self.size == 1:
            return value
        held = [value]
        with self.waiting():
            dist.broadcast_object_list(held, src=0)
        return held[0]

    def gathered(self, value: Item) -> list[Item]:
        """The value of every rank, in their order; it can be pickled."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        with self.waiting():
            dist.all_gather_object(values, value)
        return values

    def agreed(self, make: Callable[[], Item]) -> list[Item]:
        """The value that `make` gives on every rank, in their order; it can be pickled.

        Where `make` raised a TrainerError on one, all raise the first one's, as `together` does.
        """
        if self.size == 1:
            return [make()]
        value: Item | None = None
        error: TrainerError | None = None
        try:
            value = make()
        except TrainerError as raised:
            error = raised
        told = self.gathered((value, error))
        with self.together():
            for _, one in told:
                if one is not None:
                    raise one
        return [one for one, _ in told]  # type: ignore[misc]  # none raised: all made one

    def in_lockstep(self, count: int) -> list[int]:
        """The items of `count` that this rank computes where all pass through the model together: rank, rank
        + N, ... A rank that would have fewer than others computes the last one again, whose result nobody
        takes.
        """
        rounds = -(-count // self.size)
        return [min(number, count - 1) for number in range(self.rank, rounds * self.size, self.size)]

    def connect(self, device: str) -> None:
        """Send a few bytes between the devices of all ranks: what cannot is told now, not in the first step.

        Raises HardwareError, and PeerLostError where it is another host that is lost meanwhile.
        """
        if self.size == 1 or device == "cpu":
            return
        own = torch.full((16,), float(self.rank), device=device)
        found = own.new_zeros(self.size, 16)
        try:
            with contextlib.nullcontext() if self.waits is None else self.waits:
                dist.all_gather(list(found), own)
                right = bool((found == torch.arange(self.size, device=device)[:, None]).all())
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            if self.lifeline is not None and self.lifeline.shows_loss():
                raise PeerLostError(str(error)) from error
            raise _unconnected(f"the GPUs of this run cannot exchange data: {error}") from error
        if not right:
            raise _unconnected("what the GPUs of this run sent to each other did not arrive as it was sent")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A TrainerError that the block raises is raised on all ranks: rank 0 acts on it, on the others it is
        an EndedTogether.
        """
        try:
            yield
        except TrainerError as error:
            if self.first:
                raise
            raise EndedTogether from error

    def meet(self) -> None:
        """Wait until every rank is here."""
        self.gathered(None)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Give row j of `sent` (ranks, n) to rank j; row r of `received` is what rank r gave."""
        with self.waiting():
            if not (pieces := self._pieces(sent)):
                dist.all_to_all_single(received, sent)
            for piece in pieces:
                ours, theirs = sent[:, piece].contiguous(), torch.empty_like(received[:, piece])
                dist.all_to_all_single(theirs, ours)
                received[:, piece] = theirs

    def all_gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        """Write `own` (n,) of rank r to row r of `gathered` (ranks, n)."""
        with self.waiting():
            if not (pieces := self._pieces(gathered)):
                dist.all_gather(list(gathered), own)
            for piece in pieces:
                dist.all_gather(list(gathered[:, piece]), own[piece])

    def _pieces(self, rows: torch.Tensor) -> list[slice]:
        """Parts of rows (ranks, n) that travel one after the other between hosts; none where they may travel
        whole: drivers of some networks fail under more at once.
        """
        width, each = rows.shape[1], max(1, PIECE_BYTES // (rows.shape[0] * rows.element_size()))
        if self.hosts == 1 or width <= each:
            return []
        return [slice(start, min(start + each, width)) for start in range(0, width, each)]

    def send(self, tensor: torch.Tensor, source: int) -> None:
        """Write the tensor of any type of this host's rank number `source` to `tensor` on its others."""
        if tensor.numel():
            first = self.rank - self.local_rank
            with self.waiting():
                flat = tensor.reshape(-1).view(torch.uint8)
                dist.broadcast(flat, first + source, group=self.host_group)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Say meanwhile that this process waits. A library's error about the connection becomes a
        PeerLostError: gloo's and NCCL's have no class of their own.
        """
        try:
            with contextlib.nullcontext() if self.waits is None else self.waits:
                yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise PeerLostError(str(error)) from error


def is_lost_connection(error: RuntimeError) -> bool:
    """True for a library's error about another rank that is gone: gloo's has no class of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _unconnected(what: str) -> HardwareError:
    return HardwareError(
        what,
        where="parallel.gpus",
        remedy="NCCL_DEBUG=INFO tells more; NCCL_P2P_DISABLE=1 goes through host memory; write 1 for one GPU",
    )


ALONE = Ranks()
"""The one process of a run."""


def _await(store: Any, rank: int, size: int, look: Callable[[], None]) -> None:
    """Wait until all ranks have a word in the store: torch's own wait sees no signal, and has no end.

    It looks once where all are there too: the others of a killed supervisor may have ended since their word.
    """
    store.set(f"here {rank}", "")
    while True:
        is_complete = store.check([f"here {other}" for other in range(size)])
        look()
        if is_complete:
            return
        time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def joined(
    rank: int,
    size: int,
    meeting_place: Path,
    status: StatusWriter | None = None,
    *,
    device: str = "cpu",
    look: Callable[[], None] = lambda: None,
    meeting: Meeting | None = None,
    on_end: Callable[[TrainerError], None] = lambda error: None,
) -> Iterator[Ranks]:
    """Meet the other ranks of this host through a file that nobody made before, for the time of the block;
    of several hosts at the `meeting`, whose errors it raises too.

    What is on the host travels by gloo, and what is on a GPU by NCCL, which connects at its first use: see
    `Ranks.connect`. At the end every rank waits for the others; after an error none does. `look` is called
    while others are not there yet, and may raise to end that. `on_end` is called on a thread of its own when
    another host is lost, or was asked to stop alone, and ends the process. Raises HardwareError where they
    cannot meet, and LostError where it is another host that is lost meanwhile.
    """
    if size == 1:
        yield ALONE
        return
    waits = None if status is None else Waits(status)
    ranks = Ranks(rank=rank, size=size, hosts=1 if meeting is None else meeting.hosts, waits=waits)
    try:
        with contextlib.nullcontext() if waits is None else waits:
            if meeting is None:
                look()  # the supervisor of a rank that is to end may be gone, and its folder with it
                store = dist.FileStore(str(meeting_place), size)  # type: ignore[attr-defined]
                store.set_timeout(_TIMEOUT)
                _await(store, rank, size, look)
            else:
                store = met(meeting, rank, size, look)
                # NCCL waits there for rank 0, which may come to its first exchange long after the others
                store.set_timeout(_TIMEOUT)
                ranks = replace(ranks, lifeline=_lifeline(meeting, ranks, on_end))
            ranks = replace(ranks, host_group=_process_group(store, ranks, device))
    except RuntimeError as error:
        if status is not None:  # mostly because another one has ended, which says why
            status.wait_to_be_ended()
        raise _unmet(ranks, error) from error
    with _losing(ranks.lifeline, status):
        yield ranks
        ranks.meet()
    ranks.part()
    if waits is not None:
        waits.end()
    dist.destroy_process_group()


@contextlib.contextmanager
def _losing(lifeline: Lifeline | None, status: StatusWriter | None) -> Iterator[None]:
    """Make a lost connection of several hosts a LostError, which says as much as is known of the other one,
    and tell other hosts of a stop.

    Where it is a rank of this host that is gone, the supervisor ends this one meanwhile.
    """
    try:
        yield
    except (EndedTogether, StoppedError) as error:
        if lifeline is not None:
            lifeline.leave(stopped=isinstance(error, StoppedError))
        raise
    except (PeerLostError, RuntimeError) as error:
        if lifeline is None or (isinstance(error, RuntimeError) and not is_lost_connection(error)):
            raise
        if status is not None:
            status.wait_to_be_ended(_ELSEWHERE_SECONDS)
        known = lifeline.silent(_ELSEWHERE_SECONDS / 2) or "the connection to another machine broke"
        raise LostError(f"{known} ({error})", remedy=GO_ON) from error


def _process_group(store: Any, ranks: Ranks, device: str) -> dist.ProcessGroup | None:
    """Make the group of all ranks; gives the one of this host's, where it has several among others'."""
    backend, size, each = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", ranks.size, ranks.ranks_here
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=size, timeout=_TIMEOUT)
    if each in (1, size):
        return None
    made = [  # all ranks make all groups, in one order
        dist.new_group(list(range(first, first + each)), timeout=_TIMEOUT, backend=backend)
        for first in range(0, size, each)
    ]
    return made[ranks.host]


def _lifeline(meeting: Meeting, ranks: Ranks, on_end: Callable[[TrainerError], None]) -> Lifeline:
    """The lifeline of this rank, by a connection of its own: the group's may be busy for long."""
    waits, others = ranks.waits, (one for one in range(meeting.hosts) if one != meeting.host)
    lifeline = Lifeline(
        connected(meeting),
        ranks.rank,
        {host: meeting.ranks_of(host, ranks.size) for host in others},
        waits=lambda: waits is not None and waits.now(),
        on_others_work=lambda: None if waits is None else waits.still(),
        on_end=on_end,
    )
    lifeline.begin()
    return lifeline


def _unmet(ranks: Ranks, error: RuntimeError) -> HardwareError | LostError:
    """The error of processes that cannot connect: another machine's where that is lost meanwhile."""
    if ranks.lifeline is not None and ranks.lifeline.shows_loss():
        return LostError(f"another machine was lost while all connected ({error})", remedy=GO_ON)
    remedy = "see whether this machine lets programs connect over its loopback interface, or write 1"
    if ranks.hosts > 1:
        remedy = (
            "the machines must reach each other at any port, by the interface that GLOO_SOCKET_IFNAME names:"
            " `trainer plan` shows it"
        )
    return HardwareError(
        f"the {ranks.size} processes of this run cannot connect to each other: {error}",
        where="parallel.gpus",
        remedy=remedy,
    )
