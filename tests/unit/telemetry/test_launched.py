"""A parent for each rank, as launchers start them: one verdict, the first cause is every one's exit code."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.ranks import is_gone
from trainer.errors import ExitCode
from trainer.telemetry.status import Phase, StatusWriter, rank_folder, read_ranks
from trainer.telemetry.supervising.others import Others

from .conftest import AGREED, CHILD, Run, Start, wait_for
from .test_ranks import FAST, failing

RANKS = 3
DEAF = CHILD.replace("flag.install()", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
"""A child as one that sits in an exchange."""


def launched(start: Start, **given: object) -> tuple[list[Run], list[int]]:
    """The supervisor of each rank, and its child."""
    first = start(ranks=RANKS, only=0, **given)
    wait_for(lambda: True if (first.directory / "ready").exists() else None)
    runs = [first, *(start(ranks=RANKS, only=rank, **given) for rank in range(1, RANKS))]
    return runs, [runs[0].child(rank) for rank in range(RANKS)]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_killed_rank_ends_all_within_seconds_and_its_parent_says_so(fork: Start, rank: int) -> None:
    runs, children = launched(fork, child=DEAF)
    os.kill(children[rank], signal.SIGKILL)
    ends = [run.end() for run in runs]
    assert [code for code, _ in ends] == [137] * RANKS
    said = [bool(errors) for _, errors in ends]
    assert said == [one == rank for one in range(RANKS)]
    assert ends[rank][1].startswith(f"supervisor: rank {rank}: SIGKILL: killed from outside")
    assert all(is_gone(pid) for pid in children)
    status = runs[0].status()
    assert status is not None and status.exit_code == 137 and status.cause.startswith(f"rank {rank}: SIGKILL")


def test_an_abort_waits_for_what_another_parent_says(fork: Start, tmp_path: Path) -> None:
    """NCCL aborts ranks 0 and 2 before the killed rank 1, which still gives its memory back, has ended."""
    end = tmp_path / "end"
    ends = DEAF.replace(
        "    time.sleep(0.02)",
        f"    if Path({str(end)!r}).exists():\n        if rank != 1: os.abort()\n"
        "        time.sleep(1)\n        os.kill(os.getpid(), 9)\n    time.sleep(0.02)",
    )
    runs, _ = launched(fork, child=ends)
    end.touch()
    assert [run.end()[0] for run in runs] == [137] * RANKS


def test_sigterm_after_an_end_is_no_request(fork: Start) -> None:
    """A launcher asks the others to end once one of its processes has: they are killed, not asked."""
    runs, children = launched(fork, child=DEAF)
    os.kill(runs[0].process.pid, signal.SIGSTOP)
    os.kill(children[1], signal.SIGKILL)
    runs[1].process.wait(5)
    runs[0].process.terminate()
    os.kill(runs[0].process.pid, signal.SIGCONT)
    code, errors = runs[0].end()
    assert (code, errors) == (137, "")


def test_an_error_of_one_rank_is_the_exit_code_of_all(fork: Start) -> None:
    runs, _ = launched(fork, child=failing("sys.exit(65)"))
    runs[0].directory.with_name("end").touch()
    assert [run.end() for run in runs] == [(ExitCode.BAD_DATA, "")] * RANKS


def test_sigterm_to_all_stops_all_and_one_says_so(fork: Start) -> None:
    runs, _ = launched(fork, child=AGREED)
    for run in runs:
        run.process.terminate()
    ends = [run.end() for run in runs]
    assert [code for code, _ in ends] == [ExitCode.STOPPED] * RANKS
    assert [errors.count("SIGTERM: the run saves and ends") for _, errors in ends] == [1, 0, 0]


def test_a_rank_that_hangs_is_named_by_the_first_ones_parent(fork: Start) -> None:
    runs, children = launched(fork, child=DEAF, budget_scale=FAST)
    os.kill(children[2], signal.SIGSTOP)
    ends = [run.end() for run in runs]
    assert [code for code, _ in ends] == [ExitCode.HUNG] * RANKS
    assert "supervisor: killed as hung: rank 2: no heartbeat for" in ends[0][1]
    assert not ends[1][1] and not ends[2][1]
    assert all(is_gone(pid) for pid in children)


def test_a_rank_that_is_gone_with_its_parent_ends_the_others(start: Start) -> None:
    runs, children = launched(start, child=DEAF)
    runs[1].process.kill()
    os.kill(children[1], signal.SIGKILL)
    ends = [run.end() for run in (runs[0], runs[2])]
    assert [code for code, _ in ends] == [ExitCode.STOPPED] * 2
    said = [errors for _, errors in ends if errors]  # by whichever of the two saw it first
    assert said and all("rank 1 is gone, and so is its supervisor" in errors for errors in said)


@pytest.mark.parametrize(("seconds", "ends"), [(299.0, False), (301.0, True)])
def test_a_rank_that_nobody_starts_ends_the_run(seconds: float, ends: bool, tmp_path: Path) -> None:
    """Variables of a launcher that are left behind in a shell promise ranks that never come."""
    for rank in range(RANKS):
        clock = (lambda: time.monotonic() - seconds) if rank == 2 else time.monotonic
        StatusWriter(rank_folder(tmp_path, rank), ranks=RANKS, clock=clock).beat(Phase.LOAD)
    end = Others(own=0).end(read_ranks(tmp_path))
    assert (end is not None) is ends
    if end is not None:
        assert (end.exit_code, end.told) == (ExitCode.BAD_CONFIG, False)
        assert end.cause.startswith("rank 2 was never started: unset RANK")
    assert Others(own=1).end(read_ranks(tmp_path)) is None


def test_a_ranks_own_status_and_one_that_cannot_be_read_end_nothing(tmp_path: Path) -> None:
    """The first rank's own first beat is its parent's, as those of ranks that never start."""
    for rank in range(RANKS):
        clock = (lambda: time.monotonic() - 301.0) if rank == 0 else time.monotonic
        StatusWriter(rank_folder(tmp_path, rank), ranks=RANKS, clock=clock).beat(Phase.LOAD)
    first, second, _ = read_ranks(tmp_path)
    assert first is not None and second is not None
    failed = dataclasses.replace(first, exit_code=int(ExitCode.DIVERGED), cause="it diverged")
    for own in (first, failed):
        assert Others(own=0).end([own, second, None]) is None
    end = Others(own=1).end([failed, second, None])
    assert end is not None and (end.exit_code, end.cause, end.told) == (70, "it diverged", True)


@pytest.mark.parametrize(("seconds", "ends"), [(2.9, False), (3.1, True)])
def test_a_rank_is_lost_once_it_stays_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, ends: bool
) -> None:
    """Its parent needs a moment to say why; one that ended well, or that works again, is not lost."""
    StatusWriter(tmp_path, ranks=2).beat(Phase.TRAIN)
    alive, _ = read_ranks(tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert alive is not None
    gone = dataclasses.replace(alive, pid=ended.pid)
    now = time.monotonic()
    monkeypatch.setattr("trainer.telemetry.supervising.others.time.monotonic", lambda: now)
    others = Others(own=0)
    assert others.end([alive, gone]) is None
    now += seconds
    assert others.end([alive, dataclasses.replace(gone, phase=Phase.DONE)]) is None
    assert others.end([alive, gone]) is None, "gone since it was seen well"
    now += seconds
    assert others.end([alive, dataclasses.replace(gone, exit_code=0)]) is None
    assert others.end([alive, gone]) is None
    now += seconds
    end = others.end([alive, gone])
    assert (end is not None) is ends
    if end is not None:
        assert (end.exit_code, end.told) == (ExitCode.STOPPED, False) and end.cause.startswith(
            "rank 1 is gone"
        )
