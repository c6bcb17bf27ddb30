"""The parent over several ranks: one verdict, the first cause's exit code, nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import is_gone
from trainer.errors import ExitCode
from trainer.telemetry.status import Phase, Status, rank_folders, read_ranks, verdict_of_ranks
from trainer.telemetry.supervising.supervisor import supervise

from .conftest import AGREED, CHILD, Run, Start, wait_for

RANKS = 3
FAST = 0.005  # budget of the train phase: 1.5 s


def pids(run: Run) -> list[int]:
    return [run.child(rank) for rank in range(RANKS)]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_killed_rank_ends_all_within_seconds(fork: Start, rank: int) -> None:
    run = fork(ranks=RANKS)
    children = pids(run)
    os.kill(children[rank], signal.SIGKILL)
    code, errors = run.end()
    assert code == 128 + signal.SIGKILL
    assert f"supervisor: rank {rank}: SIGKILL: killed from outside" in errors
    assert all(is_gone(pid) for pid in children)
    status = run.status()
    assert status is not None
    assert status.exit_code == 137
    assert status.cause.startswith(f"rank {rank}: ")


def failing(code: str) -> str:
    """Rank 1 ends otherwise than well once there is a file `end` beside its runtime folder."""
    look = f"    if rank == 1 and (folder.parent.parent / 'end').exists(): {code}\n"
    return CHILD.replace("    time.sleep(0.02)", f"{look}    time.sleep(0.02)")


@pytest.mark.parametrize("code", [ExitCode.BAD_DATA, ExitCode.DIVERGED, ExitCode.OUT_OF_MEMORY])
def test_the_first_error_gives_the_exit_code(fork: Start, code: ExitCode) -> None:
    run = fork(child=failing(f"sys.exit({int(code)})"), ranks=RANKS)
    children = pids(run)
    run.directory.with_name("end").touch()
    found, errors = run.end()
    assert found == code
    assert "supervisor:" not in errors  # the rank told it itself
    assert all(is_gone(pid) for pid in children)


def test_sigterm_reaches_every_rank(start: Start) -> None:
    run = start(ranks=RANKS, child=AGREED)
    pids(run)
    run.process.terminate()
    assert run.end()[0] == ExitCode.STOPPED
    saved = [run.directory / "saved", *(run.directory / f"rank-{rank}" / "saved" for rank in (1, 2))]
    assert [path.read_text() for path in saved] == ["STOPPED"] * RANKS


def test_a_rank_that_hangs_is_named_and_ends_all(fork: Start) -> None:
    """The others beat on: it is rank 2 whose silence is told."""
    run = fork(budget_scale=FAST, ranks=RANKS)
    children = pids(run)
    os.kill(children[2], signal.SIGSTOP)

    def told() -> str | None:
        code, body = run.get("/healthz")
        return body if code == 503 else None

    assert "rank 2: no heartbeat for" in wait_for(told)
    code, errors = run.end()
    assert code == ExitCode.HUNG
    assert "supervisor: killed as hung: rank 2: no heartbeat for" in errors
    assert all(is_gone(pid) for pid in children)


def test_a_second_ctrl_c_kills_all(start: Start) -> None:
    deaf = CHILD.replace("flag.install()", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    run = start(child=deaf, ranks=RANKS)
    children = pids(run)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.8)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert all(is_gone(pid) for pid in children)


def test_metrics_tell_every_rank(fork: Start) -> None:
    run = fork(ranks=RANKS)
    pids(run)
    _, text = run.get("/metrics")
    assert all(f'trainer_rank_heartbeat_timestamp_seconds{{rank="{rank}"}}' in text for rank in range(RANKS))
    run.process.terminate()
    run.end()


def test_ranks_of_an_earlier_run_are_forgotten(fork: Start, tmp_path: Path) -> None:
    left = tmp_path / "runtime" / "rank-5"
    left.mkdir(parents=True)
    run = fork(ranks=2)
    run.child(1)
    assert not left.exists()
    # one that could not be removed is not this run's either
    left.mkdir()
    (left / "status.json").write_bytes((run.directory / "status.json").read_bytes())
    assert len(read_ranks(run.directory)) == 2
    run.process.terminate()
    run.end()


def test_other_folders_are_nobodys_ranks(tmp_path: Path, fork: Start) -> None:
    """Only rank-1, rank-2 and so on are ranks; what else lies there stays."""
    others = ["rank-1x", "rank-", "rank-01", "rank-0", "rank-one"]
    for name in others:
        (tmp_path / "runtime" / name).mkdir(parents=True)
    run = fork(ranks=2)
    run.child(1)
    assert rank_folders(run.directory) == [run.directory, run.directory / "rank-1"]
    assert all((run.directory / name).is_dir() for name in others)
    run.process.terminate()
    run.end()


def test_a_port_that_is_taken_leaves_nothing(tmp_path: Path, start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = start(ranks=3, port=taken.getsockname()[1])
        code, errors = run.end()
    assert code == ExitCode.BAD_CONFIG, errors
    assert sorted(path.name for path in run.directory.iterdir()) == ["lock"]


def test_a_rank_that_cannot_be_started_ends_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses the second one's environment."""
    made: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remembering(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        made.append(popen(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(subprocess, "Popen", remembering)
    with pytest.raises(OSError, match="too long"):
        supervise(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            environments=[dict(os.environ), {**os.environ, "HUGE": "x" * 2**18}],
            runtime_dir=tmp_path / "runtime",
            port=None,
            unified_memory=False,
        )
    (child,) = made
    assert child.wait(timeout=10) == -signal.SIGKILL


def test_a_lost_connection_is_told_with_the_code_of_a_stop(fork: Start) -> None:
    run = fork(child=failing(f"sys.exit({int(ExitCode.PEER_LOST)})"), ranks=RANKS)
    pids(run)
    run.directory.with_name("end").touch()
    code, errors = run.end()
    assert code == ExitCode.STOPPED
    assert "supervisor: rank 1: the connection between its processes broke; it can be resumed" in errors


@pytest.mark.parametrize("last", ["sys.exit(65)", "os.kill(os.getpid(), 9)"])
def test_any_cause_goes_before_a_lost_connection(fork: Start, last: str, tmp_path: Path) -> None:
    """All have ended when the supervisor looks: it does not run meanwhile."""
    ends = CHILD.replace(
        "    time.sleep(0.02)",
        f"    if Path({str(tmp_path / 'end')!r}).exists():\n        if rank == 2: {last}\n"
        f"        sys.exit({int(ExitCode.PEER_LOST)})\n    time.sleep(0.02)",
    )
    run = fork(child=ends, ranks=RANKS)
    children = pids(run)
    run.process.send_signal(signal.SIGSTOP)
    (tmp_path / "end").touch()
    wait_for(lambda: all(is_zombie(pid) for pid in children) or None)
    run.process.send_signal(signal.SIGCONT)
    assert run.end()[0] == (65 if "65" in last else 137)


@pytest.mark.parametrize(
    ("last", "code", "late"),
    [
        ("os.kill(os.getpid(), 9)", 137, True),
        ("os.kill(os.getpid(), 9)", 137, False),
        ("sys.exit(65)", 65, True),
        ("sys.exit(65)", 65, False),
        ("sys.exit(76)", 134, True),
        ("sys.exit(76)", 134, False),
        # it goes on: there is no moment at which it ends
        ("pass", 134, False),
    ],
)
def test_an_abort_waits_for_its_cause(fork: Start, last: str, code: int, late: bool, tmp_path: Path) -> None:
    """NCCL aborts a rank that lost its peer; one that is killed ends later, once its memory is given back."""
    end = tmp_path / "end"
    ends = CHILD.replace(
        "    time.sleep(0.02)",
        f"    if Path({str(end)!r}).exists():\n        if rank < 2: os.abort()\n"
        f"        time.sleep({float(late)})\n        {last}\n    time.sleep(0.02)",
    )
    run = fork(child=ends, ranks=RANKS)
    children = pids(run)
    if not late:  # all have ended when the supervisor looks, but one that goes on
        run.process.send_signal(signal.SIGSTOP)
    end.touch()
    if not late:
        wait_for(lambda: all(is_zombie(pid) for pid in children[: 2 if last == "pass" else 3]) or None)
        run.process.send_signal(signal.SIGCONT)
    found, errors = run.end()
    assert found == code
    assert all(is_gone(pid) for pid in children)
    assert ("rank 2: SIGKILL" in errors, "rank 0: SIGABRT" in errors) == (code == 137, code == 134)


def is_zombie(pid: int) -> bool:
    """True if a process has ended and its parent has not asked how."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


Make = Callable[..., Status]


@pytest.fixture
def status() -> Make:
    def make(age: float = 0.0, step: int = 5, *, waits: bool = False, phase: Phase = Phase.TRAIN) -> Status:
        return Status(phase=phase, beat=1000.0 - age, beat_unix_seconds=0.0, boot_id="", pid=1,
                      started_unix_seconds=0.0, step=step, total=9, waits=waits)  # fmt: skip

    return make


def test_a_rank_that_waits_is_not_judged(status: Make) -> None:
    """Rank 1 compiles for ten minutes, within the budget of its phase; the others wait for it."""
    compiling = status(600.0, step=0, phase=Phase.FIRST_STEP)
    found = verdict_of_ranks([status(550.0, waits=True), compiling, status(550.0, waits=True)], 1000.0)
    assert found.healthy
    assert found.reason.startswith("rank 1: phase first_step 0/9")


def test_the_rank_that_is_behind_is_named(status: Make) -> None:
    behind = verdict_of_ranks([status(400.0, step=6), status(400.0, step=5), status(400.0, step=6)], 1000.0)
    assert not behind.healthy
    assert behind.reason.startswith("rank 1: no heartbeat for 400.0 s in phase train 5/9")
    alike = verdict_of_ranks([status(350.0), status(400.0), status(375.0)], 1000.0)
    assert alike.reason.startswith("rank 1: ")


def test_a_rank_of_another_host_has_its_number_among_all(status: Make) -> None:
    here = [dataclasses.replace(status(age), first_rank=4, ranks=2) for age in (2.0, 400.0)]
    assert verdict_of_ranks(here, 1000.0).reason.startswith("rank 5: ")


def test_a_run_is_ready_when_all_of_its_ranks_are(status: Make) -> None:
    trains, loads = status(), status(phase=Phase.LOAD)
    found = [verdict_of_ranks(ranks, 1000.0) for ranks in ([trains, loads], [loads, trains], [trains] * 2)]
    assert [(one.healthy, one.ready) for one in found] == [(True, False), (True, False), (True, True)]


def test_a_rank_that_is_done_is_not_the_one_that_works(status: Make) -> None:
    """Rank 0 draws the last previews, and waits for nobody; the others have nothing left to do."""
    last = status(5.0, step=9, phase=Phase.PREVIEW)
    found = verdict_of_ranks([last, status(900.0, step=9, phase=Phase.DONE)], 1000.0)
    assert found.healthy
    assert found.reason.startswith("phase preview 9/9")
    stuck = verdict_of_ranks([status(900.0, waits=True), status(5.0, step=9, phase=Phase.DONE)], 1000.0)
    assert not stuck.healthy
    assert stuck.reason.startswith("rank 0: ")


def test_ranks_that_wait_since_the_last_one_began_to_are_healthy(status: Make) -> None:
    """Rank 0 waits for rank 1 for longer than any budget, and rank 1 is in the exchange since a moment."""
    assert verdict_of_ranks([status(4000.0, waits=True), status(2.0, waits=True)], 1000.0).healthy


def test_a_rank_that_never_wrote_does_not_hide_those_that_wait_in_vain(status: Make) -> None:
    stuck = verdict_of_ranks([status(700.0, waits=True), None, status(650.0, waits=True)], 1000.0)
    assert stuck.hung


def test_ranks_that_all_wait_for_each_other_hang(status: Make) -> None:
    stuck = verdict_of_ranks([status(700.0, waits=True), status(650.0, waits=True)], 1000.0)
    assert stuck.hung
    assert stuck.reason.startswith("rank 0: ")
