"""Runs that are asked from outside: by all ranks alike, and recorded in their folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contract.runs import (
    CPU_FACTS,
    FULL_CASES,
    LORA_CASES,
    ROOT,
    Case,
    Workshop,
    small_samples,
    steps_saved,
)
from tests.e2e.conftest import Process, Start, common_environment
from tests.ranks import is_gone
from trainer.errors import ExitCode, Problem, as_data
from trainer.telemetry import control, locks
from trainer.telemetry.control import Order, Request
from trainer.telemetry.rundir import LOCK_FILE
from trainer.telemetry.runs import State, read_run
from trainer.telemetry.status import Phase

ENDLESS = ("train.max_train_steps=100000", "checkpoint.checkpointing_steps=100000")
NO_ROUNDS = ("validation.every_steps=100000", "validation.held_out=0")
TWO = "parallel.gpus=2"


def carried_out(process: Process, order: Order) -> Request:
    """Ask for it, and wait for the answer."""
    asked = control.ask(process.run_dir, order)

    def done() -> Request | None:
        found = [one for one in control.requests(process.runtime) if one.order is order]
        times = [one for one in found if one.asked_unix_seconds >= asked.asked_unix_seconds]
        return next((one for one in times if one.step is not None), None)

    return process.wait_for(done)


def stop_before_it_draws(process: Process) -> None:
    """Ask a run for previews and to stop, both before it can look."""
    trains = process.child()
    os.kill(trains, signal.SIGSTOP)
    control.ask(process.run_dir, Order.SAMPLE)
    carried_out(process, Order.STOP)  # by its supervisor: the signal waits for the process
    os.kill(trains, signal.SIGCONT)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (LORA_CASES[0], ()),
        pytest.param(LORA_CASES[0], (TWO,), marks=pytest.mark.slow),
        pytest.param(FULL_CASES[0], (TWO,), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_saves_draws_and_stops_as_it_is_asked_to(
    case: Case, ranks: tuple[str, ...], fork: Start, tmp_path: Path
) -> None:
    process = fork(case, tmp_path, *ENDLESS, *NO_ROUNDS, *ranks)
    process.wait_for_phase(Phase.TRAIN)
    running = read_run(process.run_dir)
    assert running.state is State.RUNNING and running.health is not None and running.health.healthy
    assert len(running.statuses) == 1 + len(ranks)
    saved, drawn = carried_out(process, Order.SAVE), carried_out(process, Order.SAMPLE)
    assert saved.done == f"checkpoints/step-{saved.step:06d}"
    assert steps_saved(process.run_dir) == [f"step-{saved.step:06d}"]
    assert [one.step for one in read_run(process.run_dir).samples] == [0, 0, drawn.step, drawn.step]
    process.wait_for_phase(Phase.TRAIN, step=(drawn.step or 0) + 1)
    stop_before_it_draws(process)
    code, errors = process.end()
    assert code == ExitCode.STOPPED, errors
    assert "Traceback" not in errors and "asked to stop" in errors
    log = (process.run_dir / "log.jsonl").read_text()
    assert "the previews that it was asked for were not drawn" in log
    ended = read_run(process.run_dir)
    assert ended.state is State.RESUMABLE and len(ended.checkpoints) == 2
    assert ended.end is not None and ended.end.exit_code == ExitCode.STOPPED
    assert ended.end.problems[0].what == "stopped on request"
    assert "were not drawn" in ended.end.problems[1].what and len(ended.samples) == 4


@pytest.mark.slow
@pytest.mark.parametrize("child", ["saves", "killed"])
def test_a_run_without_its_supervisor_records_its_own_end(child: str, start: Start, tmp_path: Path) -> None:
    process = start(LORA_CASES[0], tmp_path, *ENDLESS, *NO_ROUNDS, "validation.prompts=[]")
    process.wait_for_phase(Phase.TRAIN, step=2)
    trains = process.child()
    if child == "killed":
        os.kill(trains, signal.SIGSTOP)  # it would save
    os.kill(process.popen.pid, signal.SIGKILL)
    process.popen.wait()
    assert read_run(process.run_dir).state is State.RUNNING, "it saves, and holds the folder"
    if child == "killed":
        os.kill(trains, signal.SIGKILL)
    while not is_gone(trains):
        time.sleep(0.05)
    run = read_run(process.run_dir)
    assert run.end is not None
    if child == "killed":
        assert (run.state, run.end.exit_code) == (State.BEGUN, None)
        assert "killed, or the machine went down" in run.end.meaning
    else:
        assert (run.state, run.end.exit_code) == (State.RESUMABLE, ExitCode.STOPPED)


@pytest.mark.slow
def test_an_attempt_beside_a_run_leaves_that_run_s_log_alone(start: Start, tmp_path: Path) -> None:
    """Its last line may just be written."""
    folder, half = tmp_path / "run", '{"time": "2026-11-30T12:00:00", "mess'
    folder.mkdir()
    (folder / "log.jsonl").write_text(half)
    taken = Problem(what="another run is using this folder")
    with locks.holding(folder / LOCK_FILE, supervisor=os.getpid(), taken=taken, on_wait=print):
        code, errors = start(LORA_CASES[0], tmp_path).end()
    assert code == ExitCode.BAD_CONFIG and "another run is using this folder" in errors
    assert (folder / "log.jsonl").read_text() == half
    short = ("train.max_train_steps=1", "validation.prompts=[]", *NO_ROUNDS)
    assert start(LORA_CASES[0], tmp_path, *short).end()[0] == 0
    lines = (folder / "log.jsonl").read_text().splitlines()
    assert half not in lines and any("Proved: " in json.loads(line)["message"] for line in lines)


@pytest.mark.slow
def test_an_attempt_that_is_refused_leaves_how_the_run_ended(start: Start, tmp_path: Path) -> None:
    short = ("train.max_train_steps=1", "validation.prompts=[]", *NO_ROUNDS)
    code, errors = start(LORA_CASES[0], tmp_path, *short).end()
    assert code == 0, errors
    end = read_run(tmp_path / "run").end
    assert end is not None and (end.exit_code, end.meaning) == (0, "finished")
    process = start(LORA_CASES[0], tmp_path, *short, "train.seed=4")
    assert process.end()[0] == ExitCode.BAD_CONFIG
    assert read_run(process.run_dir).end == end


@pytest.mark.slow
def test_an_error_of_the_training_process_is_data_and_recorded(yard: Workshop, tmp_path: Path) -> None:
    """A receiver that may not be asked changes no exit code."""
    case, samples = LORA_CASES[0], small_samples(tmp_path / "samples", [0, 1])
    broken = next(samples.glob("pictures/*.png"))
    broken.write_bytes(b"no picture")
    hook = tmp_path / "hook"
    hook.write_text("https://127.0.0.1:9/secret-path")
    environ = {
        **common_environment(),
        "TRAINER_FACTS": str(CPU_FACTS),
        "TRAINER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "TRAINER_METRICS_PORT": "0",
        "TRAINER_WEBHOOK_FILE": str(hook),
    }
    config = yard.write_config(case, tmp_path, samples)
    words = ["-m", "trainer", "--json", "train", str(config), "--no-probe"]
    done = subprocess.run([sys.executable, *words], env=environ, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == ExitCode.BAD_DATA, done.stderr
    told = json.loads(done.stdout)["error"]
    assert (told["exit_code"], told["meaning"]) == (65, "bad data")
    assert [problem["where"] for problem in told["problems"]] == [str(broken)]
    end = read_run(tmp_path / "run").end
    assert end is not None and end.exit_code == 65
    assert [as_data(65, end.problems)] == [told]
    assert "the webhook was not told: 127.0.0.1 is at 127.0.0.1, which is not public" in done.stderr
    assert "secret-path" not in done.stderr + (tmp_path / "run/process.json").read_text()
