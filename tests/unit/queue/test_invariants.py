"""Random operations by many schedulers: no two runs on a GPU, the order kept, nothing lost."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tests.unit.queue.fakes import CrashError, FakeLocal, FakeMachine, wanted
from trainer.errors import ConfigError, ExitCode
from trainer.queue.database import Machine
from trainer.queue.launcher import CPU, State

UUIDS = ("GPU-a", "GPU-b", "GPU-c")
SCHEDULERS = 8
CODES = (*ExitCode, 1, 137)
MOST_JOBS = 8


@dataclass
class Known:
    """A job as somebody knows it who did and saw everything."""

    gpus: tuple[str, ...]
    count: int
    held: bool = False
    asked: bool = False
    state: str = "idle"

    @property
    def expected(self) -> State:
        match self.state:
            case "live":
                return State.STOPPING if self.asked else State.RUNNING
            case "idle":
                return State.HELD if self.held else State.WAITING
        return {"done": State.FINISHED, "failed": State.FAILED, "lost": State.LOST}[self.state]


class Queue(RuleBasedStateMachine):
    """Operations of people, runs that end, and rounds in which eight schedulers look at the same time."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.machine = FakeMachine(UUIDS)
        self.schedulers = [FakeLocal(self.folder, self.machine) for _ in range(SCHEDULERS)]
        self.queue = FakeLocal(self.folder, self.machine)
        self.threads = self.stack.enter_context(ThreadPoolExecutor(SCHEDULERS))
        self.known: dict[str, Known] = {}
        self.order: list[str] = []
        self.boots = itertools.count(2)
        self.names = itertools.count()

    @rule(
        target=jobs,
        sets=st.lists(
            st.sampled_from(
                [(), (), (CPU,), *[c for n in (1, 2, 3) for c in itertools.combinations(UUIDS, n)]]
            ),
            min_size=1,
            max_size=3,
        ),
        count=st.integers(1, 3),
        held=st.sampled_from([False, False, False, True]),
    )
    def submit(self, sets: list[tuple[str, ...]], count: int, held: bool) -> object:
        if len(self.known) + len(sets) > MOST_JOBS or self.machine.gone:
            return multiple()
        made = [Known(gpus=gpus, count=len(gpus) or count, held=held) for gpus in sets]
        requests = [wanted(f"run-{next(self.names)}", one.gpus, one.count, held=held) for one in made]
        numbers = self.queue.submit(requests)
        self.known |= dict(zip(numbers, made, strict=True))
        self.order += numbers
        return multiple(*numbers)

    @rule(job=jobs)
    def stop(self, job: str) -> None:
        one = self.known.get(job)
        if one is None or one.state in ("done", "failed", "lost"):
            with pytest.raises(ConfigError):
                self.queue.stop(job)
            return
        self.queue.stop(job)
        one.held, one.asked = True, one.state == "live"

    @rule(job=jobs)
    def hold(self, job: str) -> None:
        one = self.known.get(job)
        if one is not None and one.state in ("idle", "live"):
            self.queue.hold(job)
            one.held = True

    @rule(job=jobs)
    def release(self, job: str) -> None:
        one = self.known.get(job)
        if one is None or one.state == "done":
            with pytest.raises(ConfigError):
                self.queue.release(job)
            return
        self.queue.release(job)
        one.held = one.asked = False
        one.state = "live" if one.state == "live" else "idle"

    @rule(job=jobs, place=st.integers(1, MOST_JOBS))
    def move(self, job: str, place: int) -> None:
        if job not in self.known:
            return
        self.queue.move([job], place)
        self.order.remove(job)
        placed = [one for one in self.order if self.known[one].state == "idle"]
        before = self.order.index(placed[place - 1]) if place <= len(placed) else len(self.order)
        self.order.insert(before, job)
        idle = [at for at, one in enumerate(self.order) if self.known[one].state == "idle"]
        begun = idle[0] if idle else len(self.order)
        self.order[begun:] = sorted(self.order[begun:], key=lambda one: self.known[one].state != "live")

    @rule(job=consumes(jobs))
    def forget(self, job: str) -> None:
        one = self.known.get(job)
        if one is None:
            return
        if one.state == "live":
            with pytest.raises(ConfigError):
                self.queue.forget(job)
            return
        self.queue.forget(job)
        del self.known[job]
        self.order.remove(job)

    @rule(which=st.integers(0, 9), code=st.one_of(st.sampled_from([0, 75, None]), st.sampled_from(CODES)))
    def end(self, which: int, code: int | None) -> None:
        """A run ends with a code, or is killed with its supervisor and its watcher."""
        live = self.machine.live()
        if live:
            run = live[which % len(live)]
            run.end(code)
            one = self.known[str(run.start.job.id)]
            one.asked = False
            one.state = {None: "lost", 0: "done", 75: "idle", 76: "idle"}.get(code, "failed")

    @rule(uuid=st.sampled_from(UUIDS), pid=st.sampled_from([None, 4711]))
    def others(self, uuid: str, pid: int | None) -> None:
        """Another program comes to a GPU, or leaves it."""
        self.machine.foreign.pop(uuid, None)
        if pid is not None and not any(uuid in run.start.gpus for run in self.machine.live()):
            self.machine.foreign[uuid] = pid

    @rule(gone=st.booleans())
    def unplug(self, gone: bool) -> None:
        busy = any(UUIDS[-1] in run.start.gpus for run in self.machine.live())
        self.machine.gone = {UUIDS[-1]} if gone and not busy else set()

    @rule()
    def reboot(self) -> None:
        for run in self.machine.live():
            run.end(None)
            one = self.known[str(run.start.job.id)]
            one.state, one.asked = "lost", False
        self.machine.identity = Machine(id="machine", boot=f"boot {next(self.boots)}")

    @rule(crashes=st.sampled_from([0, 0, 0, 1, 3]))
    def look(self, crashes: int) -> None:
        """All schedulers look at once; some are killed between their leases and the start."""
        self.machine.crashes = crashes
        before = len(self.machine.started)
        together = threading.Barrier(SCHEDULERS)

        def one_look(scheduler: FakeLocal) -> None:
            together.wait()
            with contextlib.suppress(CrashError):
                scheduler.start_due()

        for look in [self.threads.submit(one_look, one) for one in self.schedulers]:
            look.result()
        self.machine.crashes = 0
        started = self.machine.started[before:]
        for run in started:
            one = self.known[str(run.start.job.id)]
            assert (one.state, one.held) == ("idle", False), run.start
            assert len(run.start.gpus) == one.count
            assert set(run.start.gpus) == set(one.gpus or run.start.gpus)
            assert one.gpus or CPU not in run.start.gpus
            one.state = "live"
        if not crashes:
            self.nobody_was_overtaken({str(run.start.job.id): run.start.gpus for run in started})

    def nobody_was_overtaken(self, started: dict[str, tuple[str, ...]]) -> None:
        """A job that still waits wants no GPU on which a later one was started in the same round."""
        there = {gpu.uuid for gpu in self.machine.gpus()}
        for place, job in enumerate(self.order):
            one = self.known[job]
            later = {uuid for other in self.order[place:] for uuid in started.get(other, ())} - {CPU}
            if one.expected is State.WAITING and one.count <= len(there):
                assert not later & set(one.gpus or UUIDS)
            taken = {uuid for run in self.machine.live() for uuid in run.start.gpus}
            idle = (there | {CPU}) - taken - set(self.machine.foreign)
            earlier = [self.known[other] for other in self.order[:place]]
            if one.expected is State.WAITING and not any(e.expected is State.WAITING for e in earlier):
                # the first that waits has a reason
                assert not (set(one.gpus) <= idle if one.gpus else one.count <= len(idle - {CPU}))

    @invariant()
    def every_state_is_true(self) -> None:
        assert not self.machine.wrong
        seen = [(str(job.id), seen.state) for job, seen in self.queue.jobs()]
        assert seen == [(job, self.known[job].expected) for job in self.order]

    def teardown(self) -> None:
        """Whatever may run runs to its end, once the machine has all its GPUs."""
        self.machine.foreign, self.machine.gone = {}, set()
        for _ in range(2 * len(self.order) + 1):
            self.look(0)
            for _ in self.machine.live():
                self.end(0, 0)
        self.every_state_is_true()
        assert not any(one.expected in (State.WAITING, State.RUNNING) for one in self.known.values())
        self.stack.close()


TestQueue = Queue.TestCase
# nothing is shrunk: what threads did once they need not do again
TestQueue.settings = settings(
    max_examples=20,
    stateful_step_count=50,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

ONE_OF_EIGHT = """
import os, sys, time
from pathlib import Path
from tests.unit.queue.fakes import FakeMachine
from trainer.queue import jobfiles
from trainer.queue.launcher import State
from trainer.queue.local import Local

folder, record = Path(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
machine = FakeMachine(("GPU-a", "GPU-b", "GPU-c", "GPU-d"))

class Short(Local):
    def launch(self, start):
        own = jobfiles.job_folder(folder, start.job.id)
        jobfiles.write_began(own, start.job.start)
        for word in ("begin", "end"):
            text = f"{time.monotonic_ns()} {word} {start.job.id} {','.join(start.gpus)}\\n"
            os.write(record, text.encode())
            time.sleep(0.001)
        jobfiles.write_exit(own, start.job.start, 0)

queue = Short(folder=folder, gpus=machine.gpus, machine=lambda: machine.identity)
print("ready", flush=True)
sys.stdin.readline()
while any(seen.state is not State.FINISHED for _, seen in queue.jobs()):
    queue.start_due()
"""


def test_eight_processes_share_four_gpus(tmp_path: Path) -> None:
    """Schedulers in processes of their own; the record of begins and ends is judged by its clock."""
    machine = FakeMachine(("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    queue = FakeLocal(tmp_path / "queue", machine)
    sets = [machine.uuids[k % 4 : k % 4 + 1 + k % 2] for k in range(40)]
    queue.submit([wanted(f"run-{k}", gpus) for k, gpus in enumerate(sets)])
    record = tmp_path / "record"
    record.touch()
    command = [sys.executable, "-c", ONE_OF_EIGHT, str(tmp_path / "queue"), str(record)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(SCHEDULERS)
    ]
    for one in started:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in started:
        one.communicate("go\n", timeout=120)
        assert one.returncode == 0
    rows = sorted(line.split() for line in record.read_text().splitlines())
    assert len(rows) == 2 * len(sets)
    users: dict[str, str] = {}
    for _, word, job, gpus in sorted(rows, key=lambda row: int(row[0])):
        for uuid in gpus.split(","):
            if word == "begin":
                assert uuid not in users, f"jobs {users[uuid]} and {job} on {uuid}"
                users[uuid] = job
            else:
                assert users.pop(uuid) == job
    begins = [int(job) for _, word, job, _ in sorted(rows, key=lambda row: int(row[0])) if word == "begin"]
    for uuid in machine.uuids:  # on each GPU in the order in which they were added
        on_it = [job for job in begins if uuid in sets[job - 1]]
        assert on_it == sorted(on_it)
