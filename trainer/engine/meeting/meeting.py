"""Where the hosts of a run meet: a store in the process of rank 0, and what they compare there first.

A host that is late is waited for, and named; one that was started otherwise ends all, before anything loads.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from trainer.engine.meeting.ended_early import await_heard, end_of, say_end
from trainer.errors import ConfigError, LostError, Problem, TrainerError
from trainer.telemetry.status import BUDGET_SECONDS, Phase

PATIENCE_SECONDS = BUDGET_SECONDS[Phase.LOAD]
"""Longest wait for hosts that have not come: all of them load meanwhile, which may take so long."""
_TELL_SECONDS = 5.0
_TELL_AGAIN_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_ANSWER_SECONDS = 10.0
_TWICE_SECONDS = 3.0
_SHOWN_DIFFERENCES = 20
_LOOK_AT = "if it has started there, look at TRAINER_MASTER: its name, its port, a firewall between"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The place of this host among those of its run, and where they meet."""

    hosts: int
    host: int
    """Number of this one."""
    address: str
    """Name or address of host 0."""
    port: int
    introduction: Mapping[str, str]
    """Values by name that must be the same on all hosts."""
    tell: Callable[[str], None]
    """Prints a line for the people at this host."""

    @property
    def place(self) -> str:
        """The address and port in words."""
        return f"{self.address}:{self.port}"

    def ranks_of(self, host: int, size: int) -> list[int]:
        """Ranks of a host, of `size` in all."""
        each = size // self.hosts
        return list(range(host * each, (host + 1) * each))


def connected(meeting: Meeting, *, server: bool = False) -> Any:
    """A connection of its own to the store, which is in this process where it is the `server`.

    Raises RuntimeError where there is none.
    """
    answer = datetime.timedelta(seconds=_ANSWER_SECONDS)
    return dist.TCPStore(  # type: ignore[attr-defined]
        meeting.address,
        meeting.port,
        is_master=server,
        wait_for_workers=False,
        timeout=answer,
    )


def met(meeting: Meeting, rank: int, size: int, look: Callable[[], None]) -> Any:
    """The store of a run once all of its ranks have come, and their hosts have compared how they were
    started.

    `look` is called meanwhile, and may raise, which the others are told. Raises ConfigError where hosts
    differ, two say that they are the same one, or the address is not that of a trainer; LostError where one
    could not start, or has not come in the time that loading may take; StoppedError where one was asked to
    stop.
    """
    waits = _Waiting(meeting, look)
    store = _serve(meeting) if rank == 0 else _reach(meeting, waits)
    speaks = rank == meeting.ranks_of(meeting.host, size)[0]
    waits.store = store
    try:
        if speaks:
            _say_hello(meeting, store)
        store.set(f"alive {rank}", "0 1")  # of the lifeline, whose first look finds a word of each
        store.set(f"here {rank}", "")
        while missing := _missing(meeting, store, size):
            if speaks:
                store.add(f"beat {meeting.host}", 1)
                _compare(meeting, store)
            waits.for_hosts(missing)
        if speaks:
            _compare(meeting, store)
    except dist.DistError as error:
        what = f"host 0 ended while this one waited for the others at {meeting.place}: {error}"
        raise LostError(
            what, where="TRAINER_MASTER", remedy="see what it says there, and start all again"
        ) from error
    return store


@dataclass(eq=False)
class _Waiting:
    """A wait for other hosts: tells who is missing, and ends after `PATIENCE_SECONDS`."""

    meeting: Meeting
    look: Callable[[], None]
    store: Any = None
    """Where others are told that this wait was ended; None before there is one."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._told: tuple[float, str] = (self._began - _TELL_AGAIN_SECONDS + _TELL_SECONDS, "")

    def for_hosts(self, missing: Sequence[int], why: str = "") -> None:
        """Wait a moment. Raises LostError where the wait has been long enough, and what `look` raises."""
        try:
            self.look()
        except TrainerError as error:
            if self.store is not None:
                with contextlib.suppress(RuntimeError):  # host 0 has ended too: nobody is there to hear it
                    _leave(self.meeting, self.store, error)
            raise
        now = time.monotonic()
        names = " and ".join(f"host {one}" for one in missing)
        because = f" ({why})" if why else ""
        if now - self._began > PATIENCE_SECONDS:
            verb = "has" if len(missing) == 1 else "have"
            raise LostError(
                f"{names} {verb} not come within {PATIENCE_SECONDS:.0f} s{because}",
                where=f"{self.meeting.place}, where the {self.meeting.hosts} hosts of this run meet",
                remedy="start the same command there, with its own TRAINER_NODE_RANK; see what it says there,"
                " and whether the machines reach each other at that address and port",
            )
        at, before = self._told
        if now - at > (_TELL_AGAIN_SECONDS if names == before or not before else _TELL_SECONDS):
            self._told = (now, names)
            self.meeting.tell(f"waiting at {self.meeting.place} for {names}{because}")
        time.sleep(_LOOK_SECONDS)


def _serve(meeting: Meeting) -> Any:
    try:
        return connected(meeting, server=True)
    except RuntimeError as error:
        raise ConfigError(
            f"the hosts cannot meet at port {meeting.port} of this one: {error}",
            where="TRAINER_MASTER",
            remedy="another program or run has this port: write another one on all hosts, as host0:29401",
        ) from error


def _reach(meeting: Meeting, waits: _Waiting) -> Any:
    """The store of host 0, once it is there."""
    while True:
        try:
            with socket.create_connection((meeting.address, meeting.port), timeout=2.0):
                pass
        except OSError as error:
            waits.for_hosts([0], f"{error.strerror or error}; {_LOOK_AT}")
            continue
        try:
            return connected(meeting)
        except RuntimeError as error:
            if not _answers(meeting):  # it ended meanwhile, and may start again
                continue
            raise ConfigError(
                f"what answers at {meeting.place} is no trainer that waits for others: {error}",
                where="TRAINER_MASTER",
                remedy="write the address of host 0, and a port that nothing else uses there, on all hosts",
            ) from error


def _missing(meeting: Meeting, store: Any, size: int) -> list[int]:
    """Hosts of which a rank is not here."""
    every = range(meeting.hosts)
    return [one for one in every if not store.check([f"here {rank}" for rank in meeting.ranks_of(one, size)])]


def _say_hello(meeting: Meeting, store: Any) -> None:
    """Introduce this host. Raises ConfigError where another one has its number, and is alive."""
    if _is_there_already(meeting, store):
        raise ConfigError(
            f"another machine or start says that it is host {meeting.host} too",
            where="TRAINER_NODE_RANK",
            remedy=f"give each of the {meeting.hosts} hosts its own number, from 0",
        )
    store.set(f"host {meeting.host}", json.dumps(dict(meeting.introduction)))


def _is_there_already(meeting: Meeting, store: Any) -> bool:
    """Whether another start has this host's number, and counts while it waits."""
    if not store.check([f"host {meeting.host}"]):
        return False
    beat, end = f"beat {meeting.host}", time.monotonic() + _TWICE_SECONDS
    before = store.add(beat, 0)
    while time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        if store.add(beat, 0) != before:
            return True
    return False


def _compare(meeting: Meeting, store: Any) -> None:
    """Raise ConfigError with what differs between this host and others that have come, and the error of
    `end_of` where one has ended.
    """
    others = [one for one in range(meeting.hosts) if one != meeting.host]
    ended = next(filter(None, (end_of(store, other) for other in others)), None)
    others = [one for one in others if store.check([f"host {one}"])]
    problems: list[Problem] = []
    for other in others:
        theirs = json.loads(store.get(f"host {other}"))
        problems += differences(meeting.introduction, theirs, f"host {other}")
    if ended is None and not problems:
        return
    store.set(f"told {meeting.host}", "")
    if meeting.host == 0:
        await_heard(store, others, _ANSWER_SECONDS)
    raise ended or ConfigError(problems)


def _leave(meeting: Meeting, store: Any, error: TrainerError) -> None:
    """Say in the store why this host waits no more; host 0, whose process has the store, is heard first."""
    say_end(store, meeting.host, error.exit_code, error.problems[0].what)
    if meeting.host == 0:
        came = [one for one in range(1, meeting.hosts) if store.check([f"host {one}"])]
        await_heard(store, came, _ANSWER_SECONDS)


def announce(meeting: Meeting, exit_code: int, what: str, seconds: float) -> bool:
    """Tell the hosts that wait, or come within so many seconds, that this one has ended; True once they are
    told.

    Nothing is told where another start of this host waits there. Raises RuntimeError where host 0 cannot have
    its port, or what answers at it is no store.
    """
    end = time.monotonic() + seconds
    if meeting.host == 0:
        store = connected(meeting, server=True)
        say_end(store, 0, exit_code, what)
        return await_heard(store, range(1, meeting.hosts), seconds)
    while not _answers(meeting):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_SECONDS)
    store = connected(meeting)
    if _is_there_already(meeting, store):
        return False
    say_end(store, meeting.host, exit_code, what)
    return True


def _answers(meeting: Meeting) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((meeting.address, meeting.port), timeout=2.0):
        return True
    return False


def differences(ours: Mapping[str, str], theirs: Mapping[str, str], other: str) -> list[Problem]:
    """A problem for each value that is another one on host `other`."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    remedy = "start all hosts with the same trainer, the same configuration and their own TRAINER_NODE_RANK"
    shown = [
        Problem(
            what=f"{name} is {theirs.get(name, 'nothing')} on {other}, and {ours.get(name, 'nothing')} here",
            where=other,
            remedy=remedy,
        )
        for name in names[:_SHOWN_DIFFERENCES]
    ]
    hidden = len(names) - len(shown)
    return shown + ([Problem(what=f"... and {hidden} more", where=other)] if hidden else [])
