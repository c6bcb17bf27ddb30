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

from trainer.errors import ConfigError, LostError, Problem
from trainer.telemetry.status import BUDGET_SECONDS, Phase

PATIENCE_SECONDS = BUDGET_SECONDS[Phase.LOAD]
"""Longest wait for hosts that have not come: all of them load meanwhile, which may take so long."""
_TELL_SECONDS = 5.0
_TELL_AGAIN_SECONDS = 60.0
_LOOK_SECONDS = 0.2
_ANSWER_SECONDS = 10.0
_TWICE_SECONDS = 3.0
_SHOWN_DIFFERENCES = 20


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

    `look` is called meanwhile, and may raise. Raises ConfigError where hosts differ, two say that they are
    the same one, or the address is not that of a trainer; LostError where one has not come in the time that
    loading may take.
    """
    waits = _Waiting(meeting, look)
    store = _serve(meeting) if rank == 0 else _reach(meeting, waits)
    speaks = rank == meeting.ranks_of(meeting.host, size)[0]
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
        ) from (error)
    return store


@dataclass(eq=False)
class _Waiting:
    """A wait for other hosts: tells who is missing, and ends after `PATIENCE_SECONDS`."""

    meeting: Meeting
    look: Callable[[], None]

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._told: tuple[float, str] = (self._began - _TELL_AGAIN_SECONDS + _TELL_SECONDS, "")

    def for_hosts(self, missing: Sequence[int], why: str = "") -> None:
        """Wait a moment. Raises LostError where the wait has been long enough, ConfigError where the name of
        host 0 is known to nobody.
        """
        self.look()
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
            waits.for_hosts([0], f"{meeting.address}: {error.strerror or error}")
            continue
        try:
            return connected(meeting)
        except RuntimeError as error:
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
    name, beat = f"host {meeting.host}", f"beat {meeting.host}"
    if store.check([name]):
        before, end = store.add(beat, 0), time.monotonic() + _TWICE_SECONDS
        while time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            if store.add(beat, 0) != before:
                raise ConfigError(
                    f"another machine or start says that it is host {meeting.host} too",
                    where="TRAINER_NODE_RANK",
                    remedy=f"give each of the {meeting.hosts} hosts its own number, from 0",
                )
    store.set(name, json.dumps(dict(meeting.introduction)))


def _compare(meeting: Meeting, store: Any) -> None:
    """Raise ConfigError with what differs between this host and others that have come, and LostError where
    one cannot start.
    """
    problems: list[Problem] = []
    others = [one for one in range(meeting.hosts) if one != meeting.host]
    for other in others:
        if store.check([f"problem {other}"]):
            store.set(f"told {meeting.host}", "")
            what = f"host {other} cannot start: {store.get(f'problem {other}').decode()}"
            raise LostError(what, where=f"host {other}", remedy="see what it says there, and start all again")
    others = [one for one in others if store.check([f"host {one}"])]
    for other in others:
        theirs = json.loads(store.get(f"host {other}"))
        problems += differences(meeting.introduction, theirs, f"host {other}")
    if not problems:
        return
    store.set(f"told {meeting.host}", "")
    if meeting.host == 0:
        _await_told(store, others)
    raise ConfigError(problems)


def _await_told(store: Any, others: Sequence[int]) -> None:
    """Wait until other hosts have seen what ends them: the store ends with rank 0."""
    end = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < end and not store.check([f"told {one}" for one in others]):
        time.sleep(_LOOK_SECONDS)


def announce(meeting: Meeting, problem: str) -> None:
    """Tell the hosts that wait that this one cannot start, where they can be reached within seconds."""
    with contextlib.suppress(RuntimeError):  # nobody is there yet, who will find out by waiting
        store = connected(meeting, server=meeting.host == 0)
        store.set(f"problem {meeting.host}", problem)
        if meeting.host == 0:
            _await_told(store, range(1, meeting.hosts))


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
