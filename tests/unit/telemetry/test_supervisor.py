"""The parent process: signals, hangs, deaths, memory floors, two runs at once."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.ports import free_port
from trainer.errors import ExitCode
from trainer.telemetry import control, stop
from trainer.telemetry.control import Order
from trainer.telemetry.status import Phase, StatusWriter, read_ranks
from trainer.telemetry.supervising import cause_of_death
from trainer.telemetry.supervising.supervisor import Among, Limits, _Watch

from .conftest import CHILD, Run, Start, wait_for, write_meminfo

FAST = 0.005  # budgets: train 1.5 s, load and save 9 s


def healthz_is(run: Run, code: int) -> Callable[[], str | None]:
    def look() -> str | None:
        got, body = run.get("/healthz")
        return body if got == code else None

    return look


def samples(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_a_stopped_child_is_unhealthy_then_killed_as_hung(fork: Start) -> None:
    run = fork(budget_scale=FAST)
    os.kill(run.child(), signal.SIGSTOP)
    assert "no heartbeat for" in wait_for(healthz_is(run, 503))
    code, body = run.get("/metrics")  # still answered, with the child's last words
    assert code == 200
    assert samples(body)["trainer_healthy"] == 0
    assert samples(body)["trainer_child_up"] == 1
    assert 'trainer_phase{phase="train"} 1.0' in body
    assert run.get("/readyz")[0] == 503
    code, errors = run.end()
    assert code == ExitCode.HUNG
    assert "supervisor: killed as hung: no heartbeat for" in errors
    assert "in phase train" in errors


def test_a_pause_of_everything_is_no_hang(fork: Start) -> None:
    run = fork(budget_scale=FAST)
    child = run.child()
    os.kill(child, signal.SIGSTOP)
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(3.5)  # more than two budgets
    run.process.send_signal(signal.SIGCONT)
    time.sleep(0.5)  # the supervisor wakes first
    os.kill(child, signal.SIGCONT)
    wait_for(healthz_is(run, 200))
    run.process.terminate()
    assert run.end()[0] == ExitCode.STOPPED


def test_a_child_that_never_beats_is_found_out(start: Start) -> None:
    run = start(child="import time; time.sleep(60)", budget_scale=0.0001)
    code, errors = run.end()
    assert code == ExitCode.HUNG
    assert "in phase load" in errors


def test_kill_9_is_reported_with_its_cause(start: Start) -> None:
    run = start()
    os.kill(run.child(), signal.SIGKILL)
    code, errors = run.end()
    assert code == 128 + signal.SIGKILL
    assert "SIGKILL: killed from outside" in errors
    assert "counts no oom_kill" in errors
    status = run.status()
    assert status is not None
    assert (status.exit_code, status.phase) == (137, Phase.TRAIN)
    assert "SIGKILL" in status.cause


def test_an_oom_kill_is_told_from_other_kills(fork: Start) -> None:
    run = fork()
    child = run.child()
    run.memory_events.write_text("low 0\noom 4\noom_kill 4\n")
    os.kill(child, signal.SIGKILL)
    code, errors = run.end()
    assert code == ExitCode.OUT_OF_MEMORY
    assert "memory.events counts 1 oom_kill" in errors


def test_a_native_crash_is_explained(start: Start) -> None:
    code, errors = start(child="import os; os.abort()").end()
    assert code == 128 + signal.SIGABRT
    assert "SIGABRT: aborted by native code" in errors


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_request_reaches_the_child_and_75_is_passed_on(start: Start, signum: signal.Signals) -> None:
    signal.signal(signum, signal.SIG_DFL)  # below `nohup make test` a hangup is ignored
    run = start()
    run.child()
    run.process.send_signal(signum)
    code, errors = run.end()
    assert code == ExitCode.STOPPED
    assert (run.directory / "saved").read_text() == "STOPPED"
    assert f"{signum.name}: the run saves and ends" in errors


def test_under_nohup_a_terminal_that_closes_changes_nothing(start: Start) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = start()
    run.child()
    run.process.send_signal(signal.SIGHUP)
    run.process.terminate()
    code, errors = run.end()
    assert code == ExitCode.STOPPED
    assert errors == "supervisor: SIGTERM: the run saves and ends\n"


def test_a_stop_request_before_the_child_can_handle_it_gives_75(start: Start) -> None:
    marker = "import os, pathlib, time; pathlib.Path(os.environ['TRAINER_RUNTIME_DIR'], 'up').touch(); "
    run = start(child=marker + "time.sleep(60)")
    wait_for(lambda: (run.directory / "up").exists() or None)
    run.process.terminate()
    assert run.end()[0] == ExitCode.STOPPED


def test_a_second_interrupt_kills(fork: Start) -> None:
    run = fork(child=CHILD.replace("flag.requested is not None", "False"))
    child = run.child()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.7)  # two in the same half second are one key press
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    code, errors = run.end()
    assert code == 130
    assert "second Ctrl-C" in errors
    assert not Path(f"/proc/{child}").exists()


def test_a_second_sigterm_does_not_kill(fork: Start) -> None:
    slow = CHILD.replace('(folder / "saved")', 'time.sleep(1.5); (folder / "saved")')
    run = fork(child=slow)
    run.child()
    run.process.terminate()
    time.sleep(0.7)
    run.process.terminate()
    assert run.end()[0] == ExitCode.STOPPED
    assert (run.directory / "saved").exists()


def test_signals_while_a_stopped_run_ends_change_nothing(start: Start) -> None:
    """A process manager that signals the whole group sends signals again and again."""
    ends = "        sys.exit(flag.requested)"
    assert ends in CHILD
    # Python has given its own handlers up by the time at which it clears a module
    late = "class Late:\n    def __del__(self): os.kill(os.getpid(), signal.SIGTERM)\n\nlate = Late()\n"
    child = CHILD.replace(ends, f"        flag.uninstall()\n{ends}").replace(
        "import os,", "import os, signal,"
    )
    run = start(child=child.replace("flag = StopFlag()", f"{late}flag = StopFlag()"))
    run.child()
    while run.process.poll() is None:
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    code, errors = run.end()
    assert code == ExitCode.STOPPED
    assert errors == "supervisor: SIGTERM: the run saves and ends\n"
    assert (run.directory / "saved").exists()


def test_a_child_that_ignores_the_request_is_killed_after_the_save_budget(fork: Start) -> None:
    run = fork(child=CHILD.replace("flag.requested is not None", "False"), save_seconds=0.9)
    run.child()
    run.process.terminate()
    code, errors = run.end()
    assert code == ExitCode.HUNG
    assert "did not end within 0.9 s" in errors


@pytest.mark.parametrize("beats", [True, False])
def test_a_save_that_gets_on_may_take_longer_than_its_budget(fork: Start, beats: bool) -> None:
    """A checkpoint of hundreds of GiB on a slow disk: silence counts, as of one that nobody asked for."""
    saving = f"""
        for _ in range(200):  # 4 s, of a budget of 3 s
            writer.beat(Phase.SAVE, item_done=True) if {beats} or _ == 0 else None
            time.sleep(0.02)
        sys.exit(flag.requested)"""
    run = fork(child=CHILD.replace("        sys.exit(flag.requested)", saving), save_seconds=3.0)
    run.child()
    run.process.terminate()
    code, errors = run.end()
    assert code == (ExitCode.STOPPED if beats else ExitCode.HUNG), errors
    assert ("did not end within 3.0 s after it last got on with saving" in errors) is not beats


def test_below_the_soft_floor_the_child_saves_and_ends_with_71(fork: Start) -> None:
    run = fork(unified_memory=True)
    run.child()
    write_meminfo(run.meminfo, 9.5)
    code, errors = run.end()
    assert code == ExitCode.OUT_OF_MEMORY
    assert (run.directory / "saved").read_text() == "OUT_OF_MEMORY"
    assert "9.5 GiB of host memory are left, the soft floor is 10.0 GiB" in errors


def test_below_the_hard_floor_the_child_is_killed_with_71(fork: Start) -> None:
    run = fork(unified_memory=True)
    run.child()
    write_meminfo(run.meminfo, 5.5)
    code, errors = run.end()
    assert code == ExitCode.OUT_OF_MEMORY
    assert not (run.directory / "saved").exists()
    assert "the hard floor is 6.0 GiB" in errors


def test_memory_floors_are_for_unified_memory_only(fork: Start) -> None:
    run = fork(unified_memory=False)
    run.child()
    write_meminfo(run.meminfo, 1)
    time.sleep(0.5)
    assert run.process.poll() is None
    assert samples(run.get("/metrics")[1])["trainer_host_memory_available_bytes"] == 1024**3


def test_a_running_child_is_healthy_and_ready(fork: Start) -> None:
    run = fork()
    run.child()
    code, body = run.get("/healthz")
    assert (code, body.split(",")[0].rsplit(" ", 1)[0]) == (200, "phase train")
    assert run.get("/readyz")[0] == 200
    values = samples(run.get("/metrics")[1])
    assert (values["trainer_healthy"], values["trainer_child_up"]) == (1, 1)
    assert abs(values["trainer_heartbeat_timestamp_seconds"] - time.time()) < 30
    assert run.get("/")[0] == 404


def test_exit_codes_are_passed_on(start: Start, tmp_path: Path) -> None:
    finished = start(child="")
    assert finished.end() == (0, "")
    status = finished.status()
    assert status is not None
    assert status.phase is Phase.DONE
    assert start(child="raise SystemExit(65)").end() == (65, "")
    code, errors = start(child="raise RuntimeError('boom')").end()
    assert code == 1
    assert "unexpected exit code 1" in errors


def test_two_runs_need_two_folders_and_two_ports(start: Start, tmp_path: Path) -> None:
    first = start()
    first.child()
    code, errors = start(port=free_port()).end()
    assert code == ExitCode.BAD_CONFIG
    assert "TRAINER_RUNTIME_DIR" in errors
    code, errors = start(directory=tmp_path / "other", port=first.port).end()
    assert code == ExitCode.BAD_CONFIG
    assert "TRAINER_METRICS_PORT" in errors
    assert f"port {first.port} is in use" in errors
    assert first.get("/healthz")[0] == 200  # the first run did not notice


def test_a_child_whose_parent_was_killed_saves_and_ends(start: Start) -> None:
    run = start()
    child = run.child()
    run.process.kill()
    wait_for(lambda: (run.directory / "saved").exists() or None)
    wait_for(lambda: None if _alive(child) else True)


def test_a_start_waits_for_an_orphan_that_saves(start: Start) -> None:
    slow = CHILD.replace('(folder / "saved")', 'time.sleep(3); (folder / "saved")')
    run = start(child=slow)
    orphan = run.child()
    run.process.kill()
    second = start(child=CHILD.replace('"saved"', '"saved by the second"'))
    wait_for(lambda: True if second.child() != orphan else None)
    assert (run.directory / "saved").exists()
    second.process.terminate()
    code, errors = second.end()
    assert code == ExitCode.STOPPED
    assert "is used by another run, which is about to end: waiting for it" in errors


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_last_run_s_status_and_metrics_do_not_count(fork: Start, tmp_path: Path) -> None:
    directory = tmp_path / "runtime"
    directory.mkdir()
    (directory / "metrics.prom").write_text("# TYPE trainer_loss gauge\ntrainer_loss 7\n")
    (directory / "status.json").write_text("{}")
    run = fork(child="import time; time.sleep(60)")
    assert "phase load" in wait_for(lambda: _body_when_up(run))
    assert "trainer_loss" not in run.get("/metrics")[1]


def _body_when_up(run: Run) -> str | None:
    try:
        code, body = run.get("/healthz")
    except OSError:
        return None
    return body if code == 200 else None


def test_the_supervisor_imports_no_torch() -> None:
    script = "import sys, trainer.telemetry.supervising.supervisor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_kernel_files_that_are_missing_or_odd_are_no_error(tmp_path: Path) -> None:
    odd = tmp_path / "meminfo"
    odd.write_text("MemAvailable:\nnonsense\n")
    assert cause_of_death.available_bytes(odd) is None
    assert cause_of_death.available_bytes(tmp_path / "none") is None
    assert cause_of_death.oom_kills(tmp_path / "none") is None
    assert cause_of_death.oom_kills(None) is None
    counted = tmp_path / "memory.events"
    counted.write_text("oom_kill 3\n")
    assert [cause_of_death.oom_kills_since(counted, before) for before in (1, 3, None)] == [2, 0, None]
    assert cause_of_death.available_bytes() is not None


def test_a_signal_without_a_name_is_explained() -> None:
    code, cause = cause_of_death.explain_death(signal.SIGRTMIN + 3, oom_kills_since_start=0)
    assert code == 128 + signal.SIGRTMIN + 3
    assert "signal" in cause


def test_an_abort_among_several_hosts_says_that_nccl_may_have_lost_one() -> None:
    """Its code stays that of an abort: nothing here tells a lost host from an error of this one."""
    alone, among = (
        cause_of_death.explain_death(signal.SIGABRT, oom_kills_since_start=0, several_hosts=several)
        for several in (False, True)
    )
    assert alone[0] == among[0] == 128 + signal.SIGABRT
    assert "another host is lost" in among[1] and "host" not in alone[1]
    killed = cause_of_death.explain_death(signal.SIGKILL, oom_kills_since_start=0, several_hosts=True)
    assert "NCCL" not in killed[1]


@pytest.mark.parametrize(
    ("groups", "file", "kills"),
    [
        ("0::/docker/abc\n", "docker/abc/memory.events", 2),
        # in a cgroup namespace the own group is the root, or its path is that of the host
        ("0::/\n", "memory.events", 2),
        ("0::/kubepods/pod-1/abc\n", "memory.events", 2),
        # version 1, whose `oom_control` counts in a line of the same name
        ("12:cpu:/x\n5:memory:/docker/abc\n1:name=systemd:/x\n", "memory/docker/abc/memory.oom_control", 2),
        ("5:memory:/docker/abc\n0::/\n", "memory/memory.oom_control", 2),
        ("5:cpu:/docker/abc\n", "memory/docker/abc/memory.oom_control", 0),
        ("", "memory.events", 0),
    ],
)
def test_oom_kills_are_those_of_the_own_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, file: str, kills: int
) -> None:
    """By the formats of proc(5) and of the kernel's documents on cgroups."""
    (tmp_path / "cgroup").write_text(groups)
    monkeypatch.setattr(cause_of_death, "_SELF_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cause_of_death, "_CGROUP_ROOT", tmp_path / "sys")
    events = tmp_path / "sys" / file
    events.parent.mkdir(parents=True)
    events.write_text("oom 7\noom_kill 2\noom_group_kill 1\n")
    found = cause_of_death.memory_events_path()
    assert (found is None) == (kills == 0)
    assert cause_of_death.oom_kills(found) == (kills or None)


@pytest.mark.parametrize(
    ("kills", "code", "words"),
    [(2, 71, "counts 2 oom_kill"), (0, 137, "counts no oom_kill"), (None, 137, "no cgroup tells here")],
)
def test_what_nothing_counts_is_not_ruled_out(kills: int | None, code: int, words: str) -> None:
    found, cause = cause_of_death.explain_death(signal.SIGKILL, oom_kills_since_start=kills)
    assert found == code and words in cause


def test_the_own_cgroup_goes_before_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's file counts processes of all others too."""
    (tmp_path / "cgroup").write_text("0::/docker/abc\n")
    monkeypatch.setattr(cause_of_death, "_SELF_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cause_of_death, "_CGROUP_ROOT", tmp_path)
    for number, folder in enumerate((tmp_path, tmp_path / "docker/abc")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.events").write_text(f"oom_kill {9 - number}\n")
    assert cause_of_death.oom_kills(cause_of_death.memory_events_path()) == 8


def test_the_first_cause_goes_before_its_consequences() -> None:
    """Of what several ranks ended with: a kill, an error of ours, an abort, any other code, a lost peer."""
    ordered = (-signal.SIGKILL, ExitCode.DIVERGED, -signal.SIGABRT, 1, ExitCode.PEER_LOST)
    assert sorted(reversed(ordered), key=cause_of_death.order) == list(ordered)
    assert cause_of_death.order(-signal.SIGSEGV) == cause_of_death.order(-signal.SIGKILL)
    assert cause_of_death.order(ExitCode.STOPPED) == cause_of_death.order(ExitCode.DIVERGED)


KILLED = (0.0, int(ExitCode.HUNG), "killed as hung")
ASKED = (0.0, signal.SIGTERM, ExitCode.STOPPED)
LOW = (0.0, signal.SIGUSR1, ExitCode.OUT_OF_MEMORY)


@pytest.mark.parametrize(
    ("returncode", "known", "code", "words"),
    [
        (-signal.SIGKILL, {"_killed": KILLED}, 74, "killed as hung"),
        # one that is stuck in the kernel has no code at all
        (None, {"_killed": KILLED}, 74, "killed as hung"),
        # of several the others lost their peer, or NCCL ended them
        (ExitCode.PEER_LOST, {"_killed": KILLED}, 74, "killed as hung"),
        (-signal.SIGABRT, {"_killed": KILLED}, 74, "killed as hung"),
        # it ended by itself, a moment before
        (0, {"_killed": KILLED}, 0, ""),
        (ExitCode.DIVERGED, {"_killed": KILLED}, 70, ""),
        (-signal.SIGSEGV, {"_killed": KILLED}, 139, "SIGSEGV: crashed in native code"),
        # but for the end of another parent's rank, which is the first cause
        (ExitCode.DIVERGED, {"_killed": KILLED, "_told_elsewhere": True}, 74, "killed as hung"),
        # before it had a handler
        (-signal.SIGTERM, {"_asked": ASKED}, 75, "before there was anything to save"),
        (-signal.SIGUSR1, {"_asked": LOW}, 71, "before there was anything to save"),
        (-signal.SIGUSR1, {"_asked": ASKED}, 128 + signal.SIGUSR1, "SIGUSR1"),
        (-signal.SIGTERM, {}, 128 + signal.SIGTERM, "SIGTERM"),
        (-signal.SIGKILL, {"_asked": ASKED}, 137, "counts no oom_kill"),
        (ExitCode.PEER_LOST, {}, 75, "it can be resumed"),
        (ExitCode.PEER_LOST, {"among": Among(elsewhere=True)}, 76, ""),
        (1, {}, 1, "unexpected exit code 1"),
    ],
)
def test_the_exit_code_is_that_of_the_cause(
    tmp_path: Path, returncode: int | None, known: dict[str, Any], code: int, words: str
) -> None:
    watch = _Watch(directory=tmp_path, ranks=1, others=None, memory_events=None, limits=Limits())
    for name, value in known.items():
        setattr(watch, name, value)
    found, cause = watch._outcome(returncode, 0)
    assert found == code
    assert words in cause and bool(words) == bool(cause)


def test_a_strange_exit_tells_of_oom_kills_in_its_group(tmp_path: Path) -> None:
    """A worker that is killed for lack of memory makes Python end with an error."""
    watch = _Watch(directory=tmp_path, ranks=1, others=None, memory_events=None, limits=Limits())
    assert watch._outcome(1, 2) == (
        1,
        "unexpected exit code 1; processes of its group OOM-killed meanwhile: 2",
    )
    assert watch._outcome(1, 0) == (1, "unexpected exit code 1")
    assert watch._outcome(-signal.SIGKILL, 1)[0] == ExitCode.OUT_OF_MEMORY


@pytest.mark.parametrize(("step", "told"), [(None, 0), (0, 0), (7, 7)])
def test_a_request_to_stop_is_answered_with_the_step(tmp_path: Path, step: int | None, told: int) -> None:
    """Also before the first step, and where no status can be read."""
    StatusWriter(tmp_path).beat(Phase.TRAIN)
    (beaten,) = read_ranks(tmp_path)
    assert beaten is not None
    first = None if step is None else dataclasses.replace(beaten, optimizer_step=step or None)
    watch = _Watch(directory=tmp_path, ranks=1, others=None, memory_events=None, limits=Limits())
    control.put(tmp_path, Order.STOP)
    watch._look_at_requests(first)
    assert watch._asked is not None and watch._asked[1:] == (stop.ASK_SIGNAL, ExitCode.STOPPED)
    (request,) = control.requests(tmp_path)
    assert (request.step, request.done) == (told, "the run saves and ends")
