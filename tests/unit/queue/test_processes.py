"""Real processes, and kill -9 of each: scheduler, watcher, supervisor, child; and a machine's next boot."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.unit.queue.fakes import wanted
from trainer.errors import ExitCode
from trainer.queue import jobfiles, local, scheduler
from trainer.queue.database import Machine
from trainer.queue.launcher import CPU, State
from trainer.queue.local import Local
from trainer.queue.overview import overview
from trainer.telemetry import locks
from trainer.telemetry.locks import is_alive
from trainer.telemetry.status import Phase, Status, StatusWriter, read_status, write_end

T = TypeVar("T")
PATIENCE_SECONDS = 60.0
CHILD = """
import os, sys, time
from pathlib import Path
from trainer.telemetry.status import Phase, StatusWriter
from trainer.telemetry.stop import StopFlag, die_with_parent

flag = StopFlag()
flag.install()
die_with_parent()
folder = Path(os.environ["TRAINER_RUNTIME_DIR"])
writer = StatusWriter(folder, interval_seconds=0.02)
while True:
    writer.beat(Phase.TRAIN, step=3, total=10)
    if (folder / "end").exists():
        sys.exit(int((folder / "end").read_text()))
    if flag.requested is not None and not (folder / "slow").exists():
        (folder / "saved").touch()
        sys.exit(flag.requested)
    time.sleep(0.02)
"""
TRAIN = f"""
import os, sys
from pathlib import Path
from trainer.telemetry.supervising.supervisor import supervise

print("configuration", Path(sys.argv[1]).read_text(), "in", Path.cwd(), flush=True)
sys.exit(supervise(
    [sys.executable, "-c", {CHILD!r}],
    environments=[dict(os.environ)],
    runtime_dir=Path(os.environ["TRAINER_RUNTIME_DIR"]),
    port=None,
    unified_memory=False,
))
"""
"""A supervised run that trains nothing."""
COMMAND = (sys.executable, "-c", TRAIN)
SCHEDULER = """
import sys
from pathlib import Path
from trainer.queue import scheduler
from trainer.queue.local import Local
from trainer.telemetry.supervising.signals import collected

queue = Local(folder=Path(sys.argv[1]), gpus=tuple, command=sys.argv[3:])
with collected() as received:
    scheduler.run(queue, print, received=received, stop_runs=sys.argv[2] == "stop")
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pids:
    watcher: int
    supervisor: int
    child: int


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Local]:
    queue = Local(folder=tmp_path / "queue", gpus=tuple, command=COMMAND)
    yield queue
    for watcher in queue.children:  # their runs are asked to end by that
        watcher.kill()
        watcher.wait()


def kill(*processes: int) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for(look: Callable[[], T | None]) -> T:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        answer = look()
        if answer is not None:
            return answer
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def runtime(queue: Local, job: str) -> Path:
    return jobfiles.job_folder(queue.folder, int(job)) / jobfiles.RUNTIME


def pids(queue: Local, job: str) -> Pids:
    """The processes of a job whose child trains."""

    def training() -> Status | None:
        status = read_status(runtime(queue, job))
        begun = status is not None and status.phase is Phase.TRAIN and is_alive(status.pid)
        return status if begun else None

    child = wait_for(training).pid
    supervisor = parent(child)
    return Pids(child=child, supervisor=supervisor, watcher=parent(supervisor))


def wait_for_state(queue: Local, job: str, state: State) -> str:
    """Wait until a job has this state; its words."""

    def there() -> str | None:
        seen = queue.state(job)
        return seen.words if seen.state is state else None

    return wait_for(there)


def started(queue: Local) -> Pids:
    queue.submit([wanted("cats", (CPU,)), wanted("dogs", (CPU,))])
    assert [job.id for job in queue.start_due()] == [1]
    return pids(queue, "1")


def test_a_run_is_stopped_saves_and_goes_on(real: Local, tmp_path: Path) -> None:
    real.submit([wanted("cats", (CPU,), config="a: 1", working_folder=tmp_path)])
    real.start_due()
    found = pids(real, "1")
    # no signal to our group or session, nor to that of the terminal, reaches any of them
    assert os.getsid(found.child) == os.getsid(found.supervisor) == found.watcher != os.getsid(0)
    assert real.state("1").state is State.RUNNING
    real.stop("1")
    assert "resumable" in wait_for_state(real, "1", State.HELD)
    assert (runtime(real, "1") / "saved").exists()
    assert real.log("1").startswith(f"configuration a: 1 in {tmp_path}\n")
    assert real.start_due() == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in dataclasses.astuple(found))  # no zombie of ours
    real.release("1")
    real.start_due()
    pids(real, "1")
    (runtime(real, "1") / "end").write_text("0")
    wait_for_state(real, "1", State.FINISHED)
    assert real.log("1").count("configuration a: 1") == 2


def test_a_run_that_stops_by_itself_is_held_until_somebody_looks(real: Local) -> None:
    """A broken connection between GPUs, or a request that went past the queue, would come again."""
    real.command = (sys.executable, "-c", "import sys; print('up', flush=True); sys.exit(75)")
    real.submit([wanted("cats", (CPU,))])
    real.start_due()
    assert "resumable" in wait_for_state(real, "1", State.HELD)
    assert real.start_due() == []
    real.release("1")
    assert real.state("1").state is State.WAITING
    assert [job.id for job in real.start_due()] == [1]
    wait_for_state(real, "1", State.HELD)
    assert real.log("1") == "up\nup\n"


def test_a_try_is_drawn_and_not_trained(real: Local, tmp_path: Path) -> None:
    """Its folder is a part of one word, however it is called, and its lease is that of any job."""
    real.drawing = (sys.executable, "-c", "import sys; print(sys.argv[1:], flush=True); sys.exit(65)")
    real.submit([wanted("--lora=x try 1", (CPU,), root=tmp_path, pictures=4), wanted("cats", (CPU,))])
    assert [one.note for one in overview(real)] == [
        "makes 4 samples",
        "waits for the CPU, wanted before by --lora=x try 1 (job 1)",
    ]
    assert [job.id for job in real.start_due()] == [1]
    assert "exit code 65" in wait_for_state(real, "1", State.FAILED)
    config = real.folder / "jobs/1/config.yaml"
    assert real.log("1") == f"{[str(config), f'--try={tmp_path}/--lora=x try 1']}\n"
    entry = overview(real)[0]
    assert (entry.step, entry.note.partition(",")[0]) == (None, "makes 4 samples")


def test_a_watcher_that_never_comes_up_is_not_started_again(
    real: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*words: str) -> list[str]:
        return [sys.executable, "-c", "print('no module', flush=True)"]

    monkeypatch.setattr(local, "python", broken)
    real.submit([wanted("cats", (CPU,))])
    assert [job.id for job in real.start_due()] == [1]
    for watcher in real.children:
        watcher.wait()
    assert real.start_due() == []
    assert real.state("1").state is State.LOST
    assert real.log("1") == "no module\n"
    real.release("1")
    assert [job.id for job in real.start_due()] == [1]


def test_a_start_of_which_no_process_was_made_is_made_again(
    real: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real.submit([wanted("cats", (CPU,))])
    with monkeypatch.context() as patch:
        patch.setattr(local, "python", lambda *words: [str(tmp_path / "nothing"), *words])
        with pytest.raises(FileNotFoundError):
            real.start_due()
    assert real.state("1").state is State.WAITING
    assert [job.id for job in real.start_due()] == [1]


def test_runs_outlive_a_killed_scheduler(tmp_path: Path) -> None:
    folder = tmp_path / "queue"
    queue = Local(folder=folder, gpus=tuple, command=COMMAND)
    queue.submit([wanted("cats", (CPU,))])
    command = [sys.executable, "-c", SCHEDULER, str(folder), "leave", *COMMAND]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as scheduler:
        found = pids(queue, "1")
        scheduler.kill()
    assert queue.state("1").state is State.RUNNING
    assert queue.start_due() == []
    queue.stop("1")  # nobody needs the scheduler for that
    wait_for_state(queue, "1", State.HELD)
    assert not is_alive(found.child)


@pytest.mark.parametrize("choice", ["stop", "leave"])
def test_a_scheduler_that_is_asked_to_end_leaves_its_runs_or_has_them_save(
    tmp_path: Path, choice: str
) -> None:
    folder = tmp_path / "queue"
    queue = Local(folder=folder, gpus=tuple, command=COMMAND)
    queue.submit([wanted("cats", (CPU,))])
    command = [sys.executable, "-c", SCHEDULER, str(folder), choice, *COMMAND]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scheduler:
        found = pids(queue, "1")
        scheduler.terminate()
        told, _ = scheduler.communicate()
    assert scheduler.returncode == 0
    if choice == "stop":
        assert "waiting for runs to save" in told
        assert not is_alive(found.child)
        assert (runtime(queue, "1") / "saved").exists()
        assert "goes on by itself" in queue.state("1").words
        return
    assert queue.state("1").state is State.RUNNING
    queue.stop("1")
    wait_for_state(queue, "1", State.HELD)


def test_one_that_was_stopped_by_its_user_and_released_is_not_told_as_stopped_by_another(real: Local) -> None:
    started(real)
    real.stop("1")
    wait_for_state(real, "1", State.HELD)
    real.release("1")
    assert real.state("1").words == "stopped, goes on by itself"


def test_a_killed_watcher_has_the_run_save(real: Local) -> None:
    found = started(real)
    kill(found.watcher)
    # the supervisor's note stands in for the exit code that nobody wrote down
    assert "goes on by itself" in wait_for_state(real, "1", State.WAITING)
    assert (runtime(real, "1") / "saved").exists()
    assert [job.id for job in real.start_due()] == [1]
    pids(real, "1")


def test_a_killed_supervisor_keeps_the_lease_while_the_run_saves(real: Local) -> None:
    found = started(real)
    (runtime(real, "1") / "slow").touch()
    kill(found.supervisor)
    wait_for(lambda: None if is_alive(found.watcher) else True)
    seen = real.state("1")
    assert (seen.state, seen.words) == (State.RUNNING, "ends, with exit code 137")
    assert real.start_due() == []  # its GPU is not free
    (runtime(real, "1") / "slow").unlink()
    assert "exit code 137: ended by SIGKILL" in wait_for_state(real, "1", State.FAILED)
    assert (runtime(real, "1") / "saved").exists()
    assert [job.id for job in real.start_due()] == [2]


def test_a_killed_child_is_told_with_its_code(real: Local) -> None:
    found = started(real)
    kill(found.child)
    assert "exit code 137" in wait_for_state(real, "1", State.FAILED)
    assert "killed from outside" in real.log("1")
    assert [job.id for job in real.start_due()] == [2]


def test_a_machine_that_starts_anew_loses_no_job(
    real: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = started(real)
    kill(found.watcher, found.supervisor, found.child)
    wait_for(lambda: None if any(map(is_alive, dataclasses.astuple(found))) else True)
    (tmp_path / "boot_id").write_text("another boot\n")
    monkeypatch.setattr(locks, "_BOOT_ID", tmp_path / "boot_id")
    real.machine = machine_of(real)
    assert real.state("1").state is State.LOST
    assert "killed, or the machine was" in real.state("1").words
    assert [job.id for job in real.start_due()] == [2]
    real.release("1")
    assert real.state("1").state is State.WAITING


def machine_of(queue: Local) -> Callable[[], Machine]:
    """The machine of a queue's file as it is in this boot, also where this place has no /etc/machine-id."""
    with sqlite3.connect(queue.folder / "queue.sqlite") as connection:
        (known,) = connection.execute("SELECT machine FROM machine").fetchone()
        connection.execute("UPDATE machine SET machine = ?", (known or "this machine",))
    return lambda: Machine(id=known or "this machine", boot=locks.boot_id())


@pytest.mark.parametrize("folder", ["gone", "there"])
def test_a_run_that_cannot_be_started_fails_and_says_why(real: Local, tmp_path: Path, folder: str) -> None:
    (tmp_path / "there").mkdir()
    real.command = COMMAND if folder == "gone" else (str(tmp_path / "nothing"),)
    real.submit([wanted("cats", (CPU,), working_folder=tmp_path / folder)])
    real.start_due()
    wait_for_state(real, "1", State.FAILED)
    assert real.state("1").exit_code == (ExitCode.BAD_CONFIG if folder == "gone" else 1)
    assert "No such file or directory" in real.log("1")


def test_a_job_whose_files_are_damaged_fails_and_keeps_no_other_from_its_turn(
    real: Local, tmp_path: Path
) -> None:
    """A power cut may leave them so."""
    real.submit([wanted("damaged", (CPU,)), wanted("cats", (CPU,), working_folder=tmp_path)])
    (jobfiles.job_folder(real.folder, 1) / jobfiles.PICTURES_FILE).write_bytes(b"")
    assert "no number of pictures" in overview(real)[0].note
    real.start_due()
    assert (real.state("1").state, real.state("1").exit_code) == (State.FAILED, ExitCode.BAD_CONFIG)
    assert "no number of pictures" in real.log("1")
    real.start_due()
    wait_for_state(real, "2", State.RUNNING)
    damaged, other = overview(real)
    assert "no number of pictures" in damaged.note and "no number of pictures" not in other.note


def test_a_run_that_is_stopped_before_it_listens_is_held(real: Local, tmp_path: Path) -> None:
    real.command = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
    real.submit([wanted("cats", (CPU,))])
    real.start_due()
    wait_for(lambda: real.log("1") or None)
    real.stop("1")
    wait_for_state(real, "1", State.HELD)
    assert real.state("1").exit_code == ExitCode.STOPPED


def test_a_run_that_plans_is_alive_without_its_watcher(real: Local) -> None:
    """It has written no status yet, and does not listen; a status that is there is an earlier start's."""
    script = """
import os, signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while not (Path(os.environ["TRAINER_RUNTIME_DIR"]) / "end").exists():
    time.sleep(0.02)
"""
    real.command = (sys.executable, "-c", script)
    real.submit([wanted("cats", (CPU,)), wanted("dogs", (CPU,))])
    StatusWriter(runtime(real, "1")).beat(Phase.TRAIN)
    write_end(runtime(real, "1"), exit_code=0, cause="")
    real.start_due()
    wait_for(lambda: real.log("1") or None)
    for watcher in real.children:
        watcher.kill()
        watcher.wait()
    assert real.state("1").state is State.RUNNING
    assert real.start_due() == []
    (runtime(real, "1") / "end").touch()
    wait_for_state(real, "1", State.LOST)
    (runtime(real, "2") / "end").touch()
    assert [job.id for job in real.start_due()] == [2]


def test_a_watcher_that_is_asked_passes_it_on(real: Local) -> None:
    """A machine that shuts down asks all processes: the run saves, and goes on after the start."""
    found = started(real)
    os.kill(found.watcher, signal.SIGTERM)
    assert "goes on by itself" in wait_for_state(real, "1", State.WAITING)
    assert (runtime(real, "1") / "saved").exists()


COMMAND_LINE = """
import sys
from pathlib import Path
from trainer.cli import queue
from trainer.queue.local import Local

queue._queue = lambda: Local(folder=Path(sys.argv[1]), gpus=tuple, command=sys.argv[2:])
queue.queue(["run", "--stop-runs"])
"""


def test_a_stop_that_comes_while_a_watcher_starts_is_heeded(real: Local) -> None:
    """A Python that still imports would die of it, and the job would be lost."""
    real.submit([wanted("cats", (CPU,))])
    told: list[str] = []
    scheduler.run(real, told.append, received=[1], stop_runs=True)
    seen = real.state("1")
    assert (seen.state, seen.exit_code) == (State.WAITING, ExitCode.STOPPED), told
    assert [job.name for job in real.start_due()] == ["cats"]


def test_a_scheduler_of_a_container_ends_with_runs_that_have_saved(tmp_path: Path) -> None:
    """Runs that it left behind would be killed with the container."""
    queue = Local(folder=tmp_path / "queue", gpus=tuple, command=COMMAND)
    queue.submit([wanted("cats", (CPU,)), wanted("dogs", (CPU,))])
    command = [sys.executable, "-c", COMMAND_LINE, str(queue.folder), *COMMAND]
    for _ in range(2):  # the second goes on with what the first one stopped
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as scheduler:
            found = pids(queue, "1")
            (runtime(queue, "1") / "saved").unlink(missing_ok=True)
            scheduler.send_signal(signal.SIGTERM)
            _, said = scheduler.communicate(timeout=PATIENCE_SECONDS)
        assert scheduler.returncode == 0 and "waiting for runs to save\n" in said
        assert not any(map(is_alive, dataclasses.astuple(found)))
        assert (runtime(queue, "1") / "saved").exists()
        seen = queue.state("1")
        assert (seen.state, seen.exit_code) == (State.WAITING, ExitCode.STOPPED)
        assert not jobfiles.began(jobfiles.job_folder(queue.folder, 2), 1), "its turn has not come"
