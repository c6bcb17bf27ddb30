"""Runs that torchrun and accelerate launch start: equal to those of one supervisor, and ended together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.runs import LORA_CASES, Case, different, files, numbers, products, steps_saved
from tests.e2e.conftest import Process, Start
from tests.e2e.launching import Wrapped, accelerate, torchrun
from tests.e2e.test_interruptions import require_equal
from tests.e2e.test_ranks import TWO, ended, pids
from tests.ranks import is_gone
from trainer.telemetry.status import Phase, read_status

FIRST = LORA_CASES[0]
LONG = "train.max_train_steps=10000"
FAILED = 1
"""Exit code that launchers make of every other."""


both_launchers = pytest.mark.parametrize(
    "launcher",
    [
        torchrun(2),
        pytest.param(accelerate(2, "--multi_gpu", "--main_process_port=0"), marks=pytest.mark.slow),
    ],
    ids=["torchrun", "accelerate"],
)


def require_gone(children: list[int]) -> None:
    """All end within seconds; one without a parent is found gone a moment after its output ended."""
    end = time.monotonic() + 10
    while not all(is_gone(pid) for pid in children):
        assert time.monotonic() < end
        time.sleep(0.05)


def require_nothing_left(process: Process, children: list[int]) -> None:
    assert all(is_gone(pid) for pid in children)
    assert not list(process.runtime.glob("train-*"))


@pytest.mark.slow
@both_launchers
def test_launchers_give_the_bits_of_one_process(
    launcher: Wrapped, start: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    process = start(FIRST, tmp_path, launcher=launcher)
    printed = ended(process)
    straight = uninterrupted(FIRST)
    assert numbers(process.run_dir) == numbers(straight.run_dir)
    assert products(process.run_dir)
    assert not different(products(process.run_dir), products(straight.run_dir))
    kept = "checkpoints/*/*"
    assert not different(files(process.run_dir, kept), files(straight.run_dir, kept))
    assert "each takes 1 of a step's 2 micro-batches" in " ".join(printed.split())
    assert printed.count("Proved: ") == 1
    assert "rank 1" not in printed and "supervisor: " not in printed  # one of them speaks
    assert "ACCELERATE" not in printed
    require_nothing_left(process, [])


@pytest.mark.slow
def test_a_killed_rank_ends_all_with_its_cause_and_the_run_goes_on(
    fork_ranks: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    for rank in (0, 1):
        process = fork_ranks(FIRST, tmp_path / str(rank), launcher=torchrun(2), knobs={"patch": "rank"})
        children = pids(process, 2)
        process.wait_until((process.run_dir / "checkpoints" / "step-000005").is_dir)
        began = time.monotonic()
        os.kill(children[rank], signal.SIGKILL)
        code, errors = process.end()
        assert code == FAILED, errors
        assert time.monotonic() - began < 60
        told = [line for line in errors.splitlines() if line.startswith("supervisor: ")]
        assert len(told) == 1 and told[0].startswith(f"supervisor: rank {rank}: SIGKILL: killed from outside")
        assert "exitcode  : 137" in errors  # torchrun's own summary
        require_nothing_left(process, children)
        status = read_status(process.runtime)
        assert status is not None and status.exit_code == 128 + signal.SIGKILL
        assert f"rank {rank}: SIGKILL" in status.cause
    again = fork_ranks(FIRST, tmp_path / "1", launcher=torchrun(2))
    assert "resumed from step-00000" in ended(again)
    require_equal(again.run_dir, uninterrupted(FIRST).run_dir)


@pytest.mark.slow
@both_launchers
def test_sigterm_to_the_launcher_stops_all_at_one_step(
    launcher: Wrapped, fork_ranks: Start, tmp_path: Path
) -> None:
    process = fork_ranks(FIRST, tmp_path, LONG, launcher=launcher)
    children = pids(process, 2)
    process.wait_for_phase(Phase.TRAIN, step=2)
    process.popen.send_signal(signal.SIGTERM)
    code, errors = process.end()
    assert code == FAILED, errors
    assert errors.count("stopped on request") == 1
    assert errors.count("supervisor: SIGTERM: the run saves and ends") == 1
    assert len(steps_saved(process.run_dir)) >= 1
    require_nothing_left(process, children)


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing_and_loses_no_step(fork_ranks: Start, tmp_path: Path) -> None:
    process = fork_ranks(FIRST, tmp_path, LONG, "checkpoint.checkpointing_steps=10000", launcher=torchrun(2))
    children = pids(process, 2)
    process.wait_for_phase(Phase.TRAIN, step=2)
    process.popen.kill()
    process.popen.wait()
    require_gone(children)
    assert len(steps_saved(process.run_dir)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_supervisor_ends_the_run_as_a_stop_does(
    rank: int, fork_ranks: Start, tmp_path: Path
) -> None:
    process = fork_ranks(FIRST, tmp_path, LONG, "checkpoint.checkpointing_steps=10000", launcher=torchrun(2))
    children = pids(process, 2)
    process.wait_for_phase(Phase.TRAIN, step=2)
    stat = Path(f"/proc/{children[rank]}/stat").read_text()
    began = time.monotonic()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    code, errors = process.end()
    assert code == FAILED, errors
    assert time.monotonic() - began < 60
    assert len(steps_saved(process.run_dir)) == 1
    require_gone(children)


@pytest.mark.slow
def test_a_second_try_of_the_launcher_goes_on(
    fork_ranks: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    launcher = torchrun(2, "--max_restarts=1")
    process = fork_ranks(FIRST, tmp_path, launcher=launcher, knobs={"patch": "rank"})
    children = pids(process, 2)
    process.wait_until((process.run_dir / "checkpoints" / "step-000005").is_dir)
    os.kill(children[1], signal.SIGKILL)
    errors = ended(process)
    assert "resumed from step-00000" in errors
    require_equal(process.run_dir, uninterrupted(FIRST).run_dir)
    require_nothing_left(process, children)


@pytest.mark.slow
def test_an_error_of_one_rank_is_told_once_and_ends_all(fork_ranks: Start, tmp_path: Path) -> None:
    process = fork_ranks(FIRST, tmp_path, LONG, launcher=torchrun(2), knobs={"patch": "failing"})
    children = pids(process, 2)
    code, errors = process.end()
    assert code == FAILED, errors
    assert errors.count("rank 1: error: rank 1 alone cannot go on") == 1
    assert "supervisor: " not in errors
    require_nothing_left(process, children)


@pytest.mark.parametrize(
    ("launcher", "overrides", "words"),
    [
        (
            torchrun(2),
            ("parallel.gpus=4", "train.gradient_accumulation_steps=4"),
            "--set parallel.gpus: parallel.gpus is 4, and the launcher started 2 (by WORLD_SIZE)",
        ),
        pytest.param(
            accelerate(1, "--cpu"),
            (TWO,),
            "parallel.gpus is 2, and the launcher started 1 (by accelerate launch, ACCELERATE_DYNAMO_MODE)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            accelerate(2, "--cpu"),
            (TWO,),
            "was told to start several processes, and started one",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            torchrun(3),
            (),
            "WORLD_SIZE: parallel.gpus: 3 do not share the 2 samples of a step evenly",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["torchrun", "accelerate of one", "accelerate of two in one", "not shared"],
)
def test_a_number_that_the_launcher_cannot_have_meant_is_told_once(
    launcher: Wrapped, overrides: tuple[str, ...], words: str, start: Start, tmp_path: Path
) -> None:
    process = start(FIRST, tmp_path, *overrides, launcher=launcher)
    code, errors = process.end()
    assert code == FAILED
    assert errors.count(words) == 1
    assert errors.count("bad configuration (exit code 78)") == 1
    assert not process.run_dir.exists()


@pytest.mark.slow
def test_two_launches_on_one_machine_are_refused_by_name(fork_ranks: Start, tmp_path: Path) -> None:
    first = fork_ranks(FIRST, tmp_path, LONG, launcher=torchrun(2))
    pids(first, 2)
    second = fork_ranks(FIRST, tmp_path, LONG, launcher=torchrun(2))
    code, errors = second.end()
    assert code == FAILED
    assert errors.count("is used by another run") == 1
    first.popen.send_signal(signal.SIGTERM)
    code, errors = first.end()
    assert errors.count("stopped on request") == 1
