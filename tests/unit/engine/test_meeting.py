"""Where hosts meet, over a real store on loopback, and the lifeline over one that a test breaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tests.e2e.conftest import free_port
from trainer.engine.meeting import lifeline, meeting
from trainer.engine.meeting.lifeline import Lifeline
from trainer.engine.meeting.meeting import Meeting, announce, met
from trainer.errors import ConfigError, LostError

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
    port, told = free_port(), list[str]()
    (future,) = meet(place(0, port, told, hosts=3), size=3)
    with pytest.raises(LostError, match="host 1 and host 2 have not come within"):
        future.result()
    assert told[0] == f"waiting at 127.0.0.1:{port} for host 1 and host 2"
    (future,) = meet(place(1, free_port(), told))
    with pytest.raises(LostError, match=r"host 0 has not come within .*Connection refused"):
        future.result()


def test_a_host_that_cannot_start_tells_the_one_that_waits() -> None:
    port, told = free_port(), list[str]()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(met, place(0, port, told), 0, 2, lambda: None)
        time.sleep(0.5)
        announce(place(1, port, told), "no captions (exit code 65)")
        with pytest.raises(LostError, match=r"host 1 cannot start: no captions \(exit code 65\)"):
            waiting.result()


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
            self.words |= {key: f"{self.beats} {self.words[key].split()[1]}" for key in keys}
        return [self.words[key].encode() for key in keys]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT", 0.05), ("LOST", 0.6), ("_LOOK", 0.05), ("_GONE", 0.3)):
        monkeypatch.setattr(lifeline, f"{name}_SECONDS", seconds)


def begin(store: Store, lost: list[str], on_work: Callable[[], None] = lambda: None) -> Lifeline:
    line = Lifeline(store, 0, {1: (1, 2)}, waits=lambda: False, on_others_work=on_work, on_lost=lost.append)
    line.begin()
    return line


def after(lost: list[str], seconds: float = 3.0) -> str:
    end = time.monotonic() + seconds
    while not lost and time.monotonic() < end:
        time.sleep(0.02)
    return lost[0] if lost else ""


def freeze(store: Store) -> None:
    store.counting = False


def block(store: Store) -> None:
    store.blocked.set()


def break_(store: Store) -> None:
    store.broken = True


@pytest.mark.parametrize(
    ("harm", "words"),
    [(freeze, "host 1 gave no sign of life for"), (block, "gave no answer for"), (break_, "is gone: Conn")],
)
def test_silence_is_a_lost_host(quick: None, harm: Callable[[Store], None], words: str) -> None:
    store, lost = Store(), list[str]()
    begin(store, lost)
    time.sleep(1.0)
    assert lost == [] and store.words["alive 0"].endswith(" 0")  # counters move
    harm(store)
    assert words in after(lost)
    store.blocked.clear()
    time.sleep(0.3)
    assert len(lost) == 1  # once


def test_at_the_end_of_a_run_nobody_is_lost(quick: None) -> None:
    store, lost = Store(), list[str]()
    begin(store, lost).end()
    store.broken = True
    assert after(lost, 1.2) == ""


def test_work_elsewhere_is_told_and_a_wait_of_all_is_not(quick: None) -> None:
    store, worked = Store(), list[int]()
    line = begin(store, [], lambda: worked.append(1))
    time.sleep(0.3)
    assert worked == []  # both others wait
    store.words["alive 2"] = "0 0"
    time.sleep(0.3)
    assert worked
    line.end()
