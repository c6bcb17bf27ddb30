"""`trainer health` says what /healthz says."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer.telemetry import locks
from trainer.telemetry.status import Phase, StatusWriter, write_end

from .conftest import Start, wait_for

COMMAND = "from trainer.cli.health import health; health()"


def health(directory: Path) -> tuple[int, str]:
    """Exit code and text of the command; the folder comes from the environment, as in a container."""
    environment = {**os.environ, "TRAINER_RUNTIME_DIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_no_run_a_live_one_and_a_finished_one(tmp_path: Path) -> None:
    assert health(tmp_path) == (
        1,
        "unhealthy: no run: no status has been written since this machine started\n",
    )
    StatusWriter(tmp_path).beat(Phase.CACHE, step=2, total=9)
    code, text = health(tmp_path)
    assert code == 0
    assert text.startswith("healthy: phase cache 2/9, last heartbeat ")
    write_end(tmp_path, exit_code=0, cause="")
    assert health(tmp_path) == (0, "healthy: finished\n")
    (tmp_path / "status.json").write_text('{"phase": "tra')
    assert health(tmp_path)[0] == 1


def test_the_option_goes_before_the_environment(tmp_path: Path) -> None:
    StatusWriter(tmp_path).beat(Phase.LOAD)
    command = [sys.executable, "-c", COMMAND, "--runtime-dir", str(tmp_path)]
    environment = {**os.environ, "TRAINER_RUNTIME_DIR": str(tmp_path / "other")}
    assert subprocess.run(command, env=environment, check=False, capture_output=True).returncode == 0


def test_command_and_server_give_one_verdict(start: Start) -> None:
    run = start()
    child = run.child()
    assert (run.get("/healthz")[0], health(run.directory)[0]) == (200, 0)
    os.kill(child, signal.SIGSTOP)
    time.sleep(0.1)
    path = run.directory / "status.json"
    status = json.loads(path.read_text())
    path.write_text(json.dumps({**status, "beat": status["beat"] - 400}))
    code, reason = run.get("/healthz")
    exit_code, text = health(run.directory)
    assert (code, exit_code) == (503, 1)
    assert reason.startswith("no heartbeat for 40")
    assert text.startswith("unhealthy: no heartbeat for 40")
    os.kill(child, signal.SIGCONT)


def test_the_command_imports_nothing_heavy() -> None:
    script = f"""
import sys
sys.argv = ["health", "--runtime-dir", "/nonexistent"]
try:
    {COMMAND}
except SystemExit as end:
    assert end.code == 1
heavy = {{"torch", "numpy", "pydantic", "rich", "prometheus_client", "yaml"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_run_whose_processes_were_killed_is_no_run(start: Start) -> None:
    run = start()
    child = run.child()
    assert health(run.directory)[0] == 0
    run.process.kill()
    run.process.wait()
    os.kill(child, signal.SIGKILL)
    said = wait_for(lambda: text if (text := health(run.directory)[1]).startswith("unhealthy") else None)
    assert said == "unhealthy: no run: its processes were killed; it can be resumed\n"


def test_a_lock_that_nobody_holds_is_no_run_whoever_has_its_number_now(tmp_path: Path) -> None:
    """After a restart of a container, or seen from outside, the number of the status is another process'."""
    StatusWriter(tmp_path).beat(Phase.LOAD)  # our own number: it lives
    (tmp_path / "lock").touch()
    assert health(tmp_path) == (1, "unhealthy: no run: its processes were killed; it can be resumed\n")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert health(tmp_path)[0] == 0


def test_a_rank_that_is_left_stuck_makes_no_run(tmp_path: Path) -> None:
    """It holds the lock that it inherited; the supervisor and rank 0, which beat a moment ago, are gone."""
    StatusWriter(tmp_path, ranks=2).beat(Phase.TRAIN)
    StatusWriter(tmp_path / "rank-1", ranks=2).beat(Phase.TRAIN)
    path, lock = tmp_path / "status.json", tmp_path / "lock"
    with subprocess.Popen(["true"]) as gone:
        pass
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": gone.pid}))
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        lock.write_text(json.dumps({**locks.place(), "supervisor": os.getpid()}))
        assert health(tmp_path)[0] == 0  # it is about to say why
        lock.write_text(json.dumps({**locks.place(), "supervisor": gone.pid}))
        assert health(tmp_path)[0] == 1
        other = {"boot": locks.boot_id(), "processes": "pid:[1]", "supervisor": gone.pid}
        lock.write_text(json.dumps(other))
        assert health(tmp_path)[0] == 0  # its numbers say nothing here


def test_a_run_whose_processes_cannot_be_seen_from_here_is_judged_by_its_lock(tmp_path: Path) -> None:
    """The run of a container has such a process id, when its folder is looked at from outside."""
    StatusWriter(tmp_path).beat(Phase.TRAIN)
    path = tmp_path / "status.json"
    with subprocess.Popen(["true"]) as gone:
        pass
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": gone.pid}))
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert health(tmp_path)[0] == 0
    assert health(tmp_path)[0] == 1
