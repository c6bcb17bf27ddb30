"""Where hosts meet, over a real store on loopback, and the lifeline over one that a test breaks."""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ports import free_port
from trainer.engine import ranks as module
from trainer.engine.meeting import lifeline, meeting
from trainer.engine.meeting.lifeline import Lifeline
from trainer.engine.meeting.meeting import Meeting, announce, met
from trainer.engine.ranks import Ranks, joined
from trainer.errors import (
    ConfigError,
    HardwareError,
    LostError,
    PeerLostError,
    StoppedError,
    TrainerError,
)

SAME = {"the trainer": "1", "train.seed": "0"}


def place(host: int, port: int, told: list[str], said: Mapping[str, str] = SAME, hosts: int = 2) -> Meeting:
    return Meeting(
        hosts=hosts, host=host, address="127.0.0.1", port=port, introduction=said, tell=told.append
    )


def meet(*places: Meeting, size: int = 2) -> list[Future[Any]]:
    """Each host's first rank in a thread of its own, all at an end."""
    each = size // places[0].hosts
    with ThreadPoolExecutor(len(places)) as pool:
        return [pool.submit(met, one, one.host * each, size, lambda: None) for one in places]


def test_equal_hosts_meet_at_one_store() -> None:
    port, told = free_port(), list[str]()
    stores = [future.result() for future in meet(place(0, port, told), place(1, port, told))]
    stores[1].set("word", "from host 1")
    assert stores[0].get("word") == b"from host 1"


def test_what_differs_is_told_on_both() -> None:
    port, told = free_port(), list[str]()
    other = {**SAME, "train.seed": "1", "more": "2"}
    for future, words in zip(
        meet(place(0, port, told), place(1, port, told, other)),
        ("train.seed is 1 on host 1, and 0 here", "train.seed is 0 on host 0, and 1 here"),
        strict=True,
    ):
        with pytest.raises(ConfigError, match=words) as raised:
            future.result()
        assert len(raised.value.problems) == 2 and "nothing" in str(raised.value)


def test_a_host_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 1.5)
    monkeypatch.setattr(meeting, "_TELL_SECONDS", 0.3)
    port, told, other = free_port(), list[str](), list[str]()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(met, place(0, port, told, hosts=3), 0, 3, lambda: None)
        second = pool.submit(met, place(1, free_port(), other), 1, 2, lambda: None)
    with pytest.raises(LostError, match="host 1 and host 2 have not come within"):
        first.result()
    assert told[0] == f"waiting at 127.0.0.1:{port} for host 1 and host 2"
    with pytest.raises(LostError, match=r"host 0 has not come within .*Connection refused"):
        second.result()
    assert (
        "for host 0 (Connection refused; if it has started there, look at TRAINER_MASTER: its name"
        in other[-1]
    )


@pytest.mark.parametrize(("gone", "error"), [(False, ConfigError), (True, LostError)])
def test_a_host_0_that_ends_while_one_connects_is_waited_for(
    gone: bool, error: type[TrainerError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what goes on to answer without being a store is another program."""
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 1.0)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:

        def connected(_: Meeting) -> None:
            if gone:
                server.close()
            raise RuntimeError("Connection reset by peer")

        monkeypatch.setattr(meeting, "connected", connected)
        with pytest.raises(error):
            met(place(1, port, []), 1, 2, lambda: None)


def test_a_host_that_cannot_start_tells_those_that_wait_and_host_0_is_heard_first() -> None:
    """Host 0 has the store: it stays until host 1, which waits too, has read what ends them."""
    port, told = free_port(), list[str]()
    with ThreadPoolExecutor(3) as pool:
        saying = pool.submit(announce, place(2, port, told, hosts=3), 78, "a typo\x1b[2J", 10.0)
        time.sleep(0.5)  # host 0 is not there yet
        waiting = [
            pool.submit(met, place(host, port, told, hosts=3), host, 3, lambda: None) for host in (0, 1)
        ]
        for future in waiting:
            with pytest.raises(
                LostError, match=r"host 2 could not start: a typo.* \(exit code 78\)"
            ) as raised:
                future.result()
            assert "\x1b" not in str(raised.value)
        assert saying.result()


def test_host_0_that_cannot_start_waits_for_those_that_come() -> None:
    port, told = free_port(), list[str]()
    with ThreadPoolExecutor(2) as pool:
        saying = pool.submit(announce, place(0, port, told), 65, "no captions", 10.0)
        with pytest.raises(LostError, match=r"host 0 could not start: no captions \(exit code 65\)"):
            pool.submit(met, place(1, port, told), 1, 2, lambda: None).result()
        assert saying.result()
    assert not announce(place(0, free_port(), told), 65, "no captions", 0.3)  # nobody came
    assert not announce(place(1, free_port(), told), 65, "no captions", 0.3)


def test_two_hosts_with_one_fault_do_not_wait_for_each_other() -> None:
    port, told = free_port(), list[str]()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(announce, place(host, port, told), 78, "a typo", 30.0) for host in (0, 1)]
        assert [future.result() for future in both] == [True, True]


def test_a_second_start_that_fails_does_not_end_the_first_one() -> None:
    """Its runtime folder is the first one's, so that it is refused."""
    port, told, ended = free_port(), list[str](), threading.Event()

    def look() -> None:
        if ended.is_set():
            raise StoppedError("stopped on request")

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(met, place(host, port, told, hosts=3), host, 3, look) for host in (0, 1)]
        time.sleep(0.5)
        assert not announce(place(1, port, told, hosts=3), 78, "the folder is taken", 5.0)
        assert not any(future.done() for future in waiting)
        ended.set()
        for future in waiting:
            with pytest.raises(StoppedError):
                future.result()


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_while_hosts_wait_stops_all_that_are_there(asked: int) -> None:
    port, told, ended = free_port(), list[str](), threading.Event()

    def look() -> None:
        if ended.is_set():
            raise StoppedError("stopped on request")

    looks = [look if host == asked else lambda: None for host in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(met, place(host, port, told, hosts=3), host, 3, looks[host]) for host in (0, 1)
        ]
        time.sleep(0.5)
        ended.set()
        words = ["stopped on request", f"host {asked} was asked to stop before the hosts had met"]
        for host, future in enumerate(waiting):
            with pytest.raises(StoppedError, match=words[host != asked]):
                future.result()


def test_a_wait_ends_where_it_was_asked_to() -> None:
    class AskedError(Exception):
        pass

    def look() -> None:
        raise AskedError

    with pytest.raises(AskedError):
        met(place(1, free_port(), []), 1, 2, look)


class Store:
    """A store whose words a test changes; `blocked` holds its answer back, `broken` raises."""

    def __init__(self) -> None:
        self.words = {"alive 1": "0 1", "alive 2": "0 1"}
        self.blocked, self.broken, self.counting = threading.Event(), False, True
        self.beats = 0

    def set(self, key: str, value: str) -> None:
        if self.broken:
            raise dist.DistError("Connection reset by peer")
        self.words[key] = value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        while self.blocked.is_set():
            time.sleep(0.01)
        self.beats += 1
        if self.counting:
            counts = {key: f"{self.beats} {self.words[key].split()[1]}" for key in keys}
            self.words |= {key: word for key, word in counts.items() if self.words[key][0].isdigit()}
        return [self.words[key].encode() for key in keys]


LOST_SECONDS = 2.0
"""Silence that is a loss: long enough for threads of a busy machine, which count on meanwhile."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT", 0.05), ("LOST", LOST_SECONDS), ("_LOOK", 0.05), ("_GONE", 0.3)):
        monkeypatch.setattr(lifeline, f"{name}_SECONDS", seconds)


def begin(store: Store, lost: list[TrainerError], on_work: Callable[[], None] = lambda: None) -> Lifeline:
    line = Lifeline(store, 0, {1: (1, 2)}, waits=lambda: False, on_others_work=on_work, on_end=lost.append)
    line.begin()
    return line


def in_time(happened: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether something happens within a time that a busy machine does not need."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def after(lost: list[TrainerError], seconds: float = 60.0) -> str:
    """Why the run is ended, once it is; nothing where it is not within these seconds."""
    return str(lost[0]) if in_time(lambda: bool(lost), seconds) else ""


def freeze(store: Store) -> None:
    store.counting = False


def block(store: Store) -> None:
    store.blocked.set()


def break_(store: Store) -> None:
    store.broken = True


def test_silence_is_a_lost_host(quick: None) -> None:
    harms: list[tuple[Callable[[Store], None], str]] = [
        (freeze, "host 1 gave no sign of life for"), (block, "gave no answer for"), (break_, "is gone: Conn"),
    ]  # fmt: skip
    stores, lost = [Store() for _ in harms], [list[TrainerError]() for _ in harms]
    for store, found in zip(stores, lost, strict=True):
        begin(store, found)
    time.sleep(1.5 * LOST_SECONDS)
    assert not any(lost) and all(store.words["alive 0"].endswith(" 0") for store in stores)  # counters move
    for store, (harm, _) in zip(stores, harms, strict=True):
        harm(store)
    for found, (_, words) in zip(lost, harms, strict=True):
        assert words in after(found)
    for store in stores:
        store.blocked.clear()
    time.sleep(0.3)
    assert all(len(found) == 1 and isinstance(found[0], LostError) for found in lost)  # once


def test_a_store_that_answers_late_is_no_lost_host(quick: None) -> None:
    """Host 0 stood still for a moment: torch gives up each question sooner than the host is lost."""

    class Late(Store):
        asked = 0

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self.asked += 1
            if self.asked in (3, 4):
                time.sleep(0.2)
                raise dist.DistStoreError("wait timeout after 200ms, keys: /alive 1, /alive 2")
            return super().multi_get(keys)

    store, lost = Late(), list[TrainerError]()
    line = begin(store, lost)
    assert after(lost, 1.5 * LOST_SECONDS) == ""
    assert store.asked > 10
    line.end()


def test_at_the_end_of_a_run_nobody_is_lost(quick: None) -> None:
    store, lost = Store(), list[TrainerError]()
    begin(store, lost).end()
    store.broken = True
    assert after(lost, 1.5 * LOST_SECONDS) == ""


def test_work_elsewhere_is_told_and_a_wait_of_all_is_not(quick: None) -> None:
    store, worked = Store(), list[int]()
    line = begin(store, [], lambda: worked.append(1))
    time.sleep(0.3)
    assert worked == []  # both others wait
    store.words["alive 2"] = "0 0"
    assert in_time(lambda: bool(worked))
    line.end()


def test_a_host_that_left_as_agreed_is_not_missed(quick: None) -> None:
    """While this one saves, which may take longer than a silence that is a loss."""
    store, lost = Store(), list[TrainerError]()
    line = begin(store, lost)
    store.words |= {"alive 1": "left 1", "alive 2": "left 1"}
    assert after(lost, 1.5 * LOST_SECONDS) == ""
    store.words["alive 2"] = "7 0"
    store.counting = False
    assert "host 1 gave no sign of life" in after(lost)
    line.end()


def test_a_stop_of_another_host_is_a_stop_here(quick: None) -> None:
    store, lost = Store(), list[TrainerError]()
    begin(store, lost)
    store.words["alive 2"] = "stopped 1"
    assert "host 1 was asked to stop" in after(lost)
    assert isinstance(lost[0], StoppedError)
    assert in_time(lambda: store.words["alive 0"] == "left 1")  # so that the other one need not wait


def test_a_stop_here_waits_until_another_host_has_heard_it(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    line = begin(store, [])
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(line.leave, stopped=True)
        assert in_time(lambda: store.words["alive 0"] == "stopped 1")
        time.sleep(0.2)
        assert not leaving.done()
        store.words["alive 1"] = "left 1"  # one rank ends all of its host
        leaving.result(timeout=60)
    monkeypatch.setattr(lifeline, "_HEARD_SECONDS", 0.3)
    store.words["alive 1"] = "9 0"
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        pool.submit(begin(store, []).leave, stopped=True).result(timeout=60)
        assert time.monotonic() - began >= 0.3, "nobody hears it"


def test_the_store_stays_until_each_host_has_heard_of_a_stop(quick: None) -> None:
    """It ends with rank 0's process: host 2 would take that for a loss."""
    store, lost = Store(), list[TrainerError]()
    line = Lifeline(
        store, 0, {1: (1,), 2: (2,)}, waits=lambda: False, on_others_work=lambda: None, on_end=lost.append
    )
    line.begin()
    store.words["alive 1"] = "stopped 1"
    assert in_time(lambda: store.words["alive 0"] == "left 1")
    assert after(lost, 0.5) == ""
    store.words["alive 2"] = "left 1"
    assert "host 1 was asked to stop" in after(lost)


def test_a_stop_of_a_wait_stays_one_where_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise dist.DistError("Connection reset by peer")

    def look() -> None:
        raise StoppedError("stopped on request")

    monkeypatch.setattr(meeting, "say_end", gone)
    waits = meeting._Waiting(place(1, 7, []), look, store=object())
    with pytest.raises(StoppedError):
        waits.for_hosts([0])


@pytest.mark.parametrize("lost", [False, True])
def test_gpus_that_cannot_exchange_are_an_error_of_this_host_only_where_no_other_one_is_lost(
    lost: bool, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see the connection fail; the one that is there counts on meanwhile."""

    def all_gather(*_: object) -> None:
        raise RuntimeError("NCCL error: remote process exited or there was a network error")

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(lifeline, "BEAT_SECONDS", 0.5)
    store = Store()
    line = begin(store, [])
    time.sleep(0.3)
    store.counting = not lost
    ranks = Ranks(rank=0, size=3, hosts=3, lifeline=line)
    with pytest.raises(PeerLostError if lost else HardwareError, match="remote process exited"):
        ranks.connect("meta")
    line.end()


@pytest.mark.parametrize("lost", [False, True])
def test_hosts_that_cannot_connect_are_an_error_of_this_host_only_where_no_other_one_is_lost(
    lost: bool, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may be lost after all have met, while the others connect to it."""
    monkeypatch.setattr(lifeline, "BEAT_SECONDS", 0.5)
    store, timeouts = Store(), list[datetime.timedelta]()

    def fails(*_: object) -> None:
        store.counting = not lost
        raise RuntimeError("gloo: timed out connecting: SO_ERROR: Connection refused")

    class Reached:
        set_timeout = timeouts.append

    monkeypatch.setattr(module, "met", lambda *_: Reached())
    monkeypatch.setattr(module, "connected", lambda _: store)
    monkeypatch.setattr(module, "_process_group", fails)
    wanted, here = LostError if lost else HardwareError, place(0, 7, [], hosts=3)
    with pytest.raises(wanted, match="Connection refused"), joined(0, 3, Path(), meeting=here):
        pass
    assert timeouts > [datetime.timedelta(days=1)]  # torch's library never gives up by itself
