"""A host that is lost: the others end within 40 s with 76, nothing is left, and the run goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.runs import LORA_CASES, Case
from tests.e2e.conftest import Process, Start
from tests.e2e.hosts import start_hosts
from tests.e2e.test_interruptions import require_equal
from tests.e2e.test_ranks import MOMENTS, ended
from tests.ranks import is_gone
from trainer.errors import ExitCode
from trainer.telemetry.status import Phase, read_ranks

FIRST = LORA_CASES[0]
SECONDS = 40
pytestmark = pytest.mark.slow


def children(process: Process) -> list[int]:
    """The processes of a host that train, once each has a status of its own."""

    def all_there() -> list[int] | None:
        found = [one.pid for one in read_ranks(process.runtime) if one is not None]
        return found if found and process.popen.pid not in found else None

    return process.wait_for(all_there)


def end_host(process: Process, signum: signal.Signals) -> list[int]:
    """Send a host's supervisor and its ranks a signal, as a machine that is cut off or frozen; gives them."""
    ranks = children(process)
    for pid in (process.popen.pid, *ranks):
        os.kill(pid, signum)
    return ranks


def require_lost(process: Process, began: float, *words: str) -> str:
    """The host ended with 76 in time, said why, and left nothing."""
    code, errors = process.end()
    assert code == ExitCode.PEER_LOST, errors
    assert time.monotonic() - began < SECONDS
    assert "Traceback" not in errors
    for one in words:
        assert one in errors, errors
    status = process.status()
    assert status is not None and status.exit_code == ExitCode.PEER_LOST
    assert not list(process.runtime.glob("train-*"))
    return errors


@pytest.mark.parametrize(
    ("moment", "lost"), [("cache", 1), ("train", 0), ("save", 1)], ids=lambda one: str(one)
)
def test_a_host_killed_at_any_moment_ends_the_others_and_the_run_goes_on(
    moment: str, lost: int, fork_ranks: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    """Host 0 has the store and the files. Gone on with on one host, or on two."""
    slow, is_there = MOMENTS[moment]
    knobs = {} if slow is None else {0: {"patch": slow}, 1: {"patch": slow}}
    cache = tmp_path / "cache" if moment == "cache" else None
    both = start_hosts(fork_ranks, FIRST, tmp_path, knobs=knobs, cache=cache)
    both[0].wait_until(lambda: (found := both[0].status()) is not None and is_there(found))
    left = children(both[1 - lost])
    began = time.monotonic()
    ranks = end_host(both[lost], signal.SIGKILL)
    both[lost].end()
    require_lost(both[1 - lost], began, "rank ", "error: ")
    assert all(is_gone(pid) for pid in (*ranks, *left))
    if moment != "cache":
        count = {"train": 2, "save": 1}[moment]
        again = start_hosts(fork_ranks, FIRST, tmp_path, count=count)
        for process in again:
            ended(process)
        require_equal(again[0].run_dir, uninterrupted(FIRST).run_dir)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_frozen_ends_the_others(lost: int, fork_ranks: Start, tmp_path: Path) -> None:
    """Its connections stay open: it is its silence that is seen. When it thaws it ends as well."""
    both = start_hosts(fork_ranks, FIRST, tmp_path, "train.max_train_steps=100000")
    for process in both:
        process.wait_for_phase(Phase.TRAIN, step=2)
    began = time.monotonic()
    ranks = end_host(both[lost], signal.SIGSTOP)
    others = [process for number, process in enumerate(both) if number != lost]
    for process in others:
        require_lost(process, began, f"host {lost}")
    for pid in (both[lost].popen.pid, *ranks):
        os.kill(pid, signal.SIGCONT)
    code, errors = both[lost].end()
    assert code == ExitCode.PEER_LOST, errors
    assert all(is_gone(pid) for pid in ranks)


def test_of_three_hosts_one_is_lost_and_the_error_stays_where_it_was(
    fork_ranks: Start, tmp_path: Path
) -> None:
    """An error that was not agreed on keeps its code on its host; the others end with 76."""
    six = ("train.train_batch_size=1", "train.gradient_accumulation_steps=6", "train.max_train_steps=10000")
    knobs = {1: {"patch": "failing"}}
    all_three = start_hosts(fork_ranks, FIRST, tmp_path, *six, count=3, knobs=knobs)
    code, errors = all_three[1].end()
    assert code == ExitCode.BAD_DATA, errors
    assert "rank 1: error: rank 1 alone cannot go on" in errors
    began = time.monotonic()
    for number in (0, 2):
        require_lost(all_three[number], began)
