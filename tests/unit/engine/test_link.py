"""The probe of the way between GPUs: its verdicts, and its processes, which need no GPU to work."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any

import pytest

from tests.ranks import Workers
from trainer.engine.probing import link
from trainer.engine.probing.child import Answer
from trainer.engine.ranks import Ranks
from trainer.errors import EndedTogether, HardwareError


def answer(*rows: dict[str, Any], code: int | None = 0, errors: str = "") -> Answer:
    return Answer(code=code, rows=list(rows), errors=errors)


SMALL = 2**20
MET = {"met": 2}
RIGHT = answer(MET, {"exchange_ms": 0.5}, {"gib_per_second": 340.0})


@pytest.mark.slow
def test_two_processes_read_each_other_and_exchange() -> None:
    """Through the processes that measure, with memory of the host in the place of two GPUs'."""
    settled, found = link.probe_link(["cpu", "cpu"], os.environ, "1234abcd")
    assert settled and found.works
    assert (found.gpus, found.visible) == (2, "1234abcd")
    assert found.gib_per_second > 0 and found.exchange_ms > 0
    assert "every byte was right" in found.reason


def test_the_slowest_counts() -> None:
    slow = answer({"exchange_ms": 0.7}, {"gib_per_second": 20.0})
    found = link.judge([RIGHT, slow])
    assert (found.works, found.gib_per_second, found.exchange_ms) == (True, 20.0, 0.7)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (answer({"exchange_ms": 0.5}, {"trouble": "GPUs cannot read"}), "GPUs cannot read"),
        (answer({"exchange_ms": 0.5}, code=1, errors="Traceback\nRuntimeError: NCCL"), "RuntimeError: NCCL"),
        (answer(code=None), "no result within"),
        (answer(code=-11), "exit code -11"),
    ],
)
def test_what_fails_with_one_fails(bad: Answer, reason: str) -> None:
    for answers in ([RIGHT, bad], [bad, RIGHT]):
        found = link.judge(answers)
        assert not found.works and found.gib_per_second == 0.0
        assert reason in found.reason


@pytest.mark.parametrize(
    ("bad", "settled"),
    [
        (answer(MET, {"exchange_ms": 0.5}, code=None), True),  # hangs in the copies
        (answer(MET, code=None), True),  # hangs where NCCL connects
        (answer(MET, code=1, errors="RuntimeError: NCCL error"), True),
        (answer(code=None), False),  # still imports, or waits for who does
        (answer(code=1, errors="ImportError: no such file"), False),
        (answer({"trouble": "the processes cannot connect to each other"}), False),
        (answer(code=1, errors="CUDA-capable device(s) is/are busy or unavailable"), False),
        (answer(MET, {"exchange_ms": 0.5}, code=-11), True),
        (answer(MET, {"exchange_ms": 0.5}, code=-9), False),
        (answer(MET, code=1, errors="torch.OutOfMemoryError: CUDA out of memory"), False),
        (RIGHT, True),
    ],
)
def test_an_accident_settles_nothing(bad: Answer, settled: bool) -> None:
    assert link.is_settled([RIGHT, bad]) == settled


def other_bytes(ranks: Ranks, which: int, read: int | None = None) -> dict[str, object]:
    """The measurement, in which one process finds one bit of another's memory changed, that of `read`."""
    from trainer.modeling.storage import shared_memory

    opening, link.COPIED_BYTES = shared_memory.open_offer, SMALL

    opened = []

    def changed(*given: Any) -> Any:
        memory = opening(*given)
        opened.append(memory)
        if read is not None and (ranks.rank + len(opened)) % ranks.size != read:
            return memory
        copied = memory.bytes.clone()
        copied[12345] ^= 1
        return dataclasses.replace(memory, bytes=copied)

    shared_memory.open_offer = changed if ranks.rank == which else opening
    try:
        return link._read_others(ranks, "cpu")
    finally:
        shared_memory.open_offer = opening


def refused(ranks: Ranks, which: int) -> str:
    """The error where one process cannot open the other's memory."""
    from trainer.modeling.storage import shared_memory

    opening, link.COPIED_BYTES = shared_memory.open_offer, SMALL

    def fails(*_: Any) -> Any:
        raise HardwareError("GPUs of this run cannot read each other's memory: CUDA_ERROR")

    shared_memory.open_offer = fails if ranks.rank == which else opening
    try:
        link._read_others(ranks, "cpu")
    except HardwareError as error:
        return str(error)
    except EndedTogether:
        return EndedTogether.__name__
    finally:
        shared_memory.open_offer = opening
    return ""


@pytest.mark.parametrize("which", [0, 1])
def test_one_wrong_bit_is_a_verdict_that_names_both_gpus(pool: Workers, which: int) -> None:
    assert all("gib_per_second" in one for one in pool.call(other_bytes, 2, 7))  # none is changed
    told = f"GPU {which} read other bytes from GPU {1 - which} than lie there"
    assert pool.call(other_bytes, 2, which) == [{"trouble": told}] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("reader", "read"), [(0, 2), (2, 1), (1, 0)])
def test_every_pair_is_read_in_both_directions(pool: Workers, reader: int, read: int) -> None:
    told = f"GPU {reader} read other bytes from GPU {read} than lie there"
    assert pool.call(other_bytes, 3, reader, read) == [{"trouble": told}] * 3


def test_a_signal_ends_the_measurement_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(Exception):
        pass

    def tell(*_: object) -> None:
        raise Told

    monkeypatch.setattr(link, "COPIED_BYTES", SMALL)
    before = signal.signal(signal.SIGALRM, tell)
    signal.setitimer(signal.ITIMER_REAL, 0.3)  # while the processes import torch
    began = time.monotonic()
    try:
        with pytest.raises(Told):
            link.probe_link(["cpu", "cpu"], os.environ)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < link.TIMEOUT_SECONDS / 2


@pytest.mark.parametrize("which", [0, 1])
def test_memory_that_cannot_be_opened_ends_all(pool: Workers, which: int) -> None:
    first, second = pool.call(refused, 2, which)
    assert "cannot read each other's memory" in first
    assert second == "EndedTogether"
