"""A supervisor in a process of its own over a child that beats: the real thing, without training."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.e2e.nursery import ALL_RANKS, Forked, Nursery
from tests.ports import free_port
from trainer.telemetry.status import Phase, Status, rank_folder, read_status

PATIENCE_SECONDS = 30.0
T = TypeVar("T")

PARENT = """
import json, os, sys
from pathlib import Path
from trainer.errors import TrainerError
from trainer.telemetry.status import BUDGET_SECONDS, Phase
from trainer.telemetry.supervising.supervisor import Limits, supervise, supervise_one

asked = json.loads(sys.argv[1])
paths = {name: Path(asked[name]) for name in ("runtime_dir", "meminfo_path", "memory_events_path")}
command, ranks, only = [sys.executable, "-c", asked["child"]], asked["ranks"], asked.get("only")
limits = Limits(**asked["limits"])
BUDGET_SECONDS[Phase.SAVE] = asked.get("save_seconds") or BUDGET_SECONDS[Phase.SAVE]
environments = [{**os.environ, "RANK": str(rank), "RANKS": str(ranks)} for rank in range(ranks)]
try:
    if only:
        code = supervise_one(
            command,
            environment=environments[only],
            rank=only,
            ranks=ranks,
            runtime_dir=paths["runtime_dir"],
            limits=limits,
        )
    else:
        code = supervise(
            command,
            environments=environments if only is None else environments[:1],
            ranks=ranks,
            port=asked["port"],
            unified_memory=asked["unified_memory"],
            limits=limits,
            on_ready=(paths["runtime_dir"] / "ready").touch,
            **paths,
        )
except TrainerError as error:
    print(error, file=sys.stderr)
    code = error.exit_code
assert "torch" not in sys.modules
sys.exit(code)
"""

CHILD = """
import os, sys, time
from pathlib import Path
from trainer.telemetry.sinks.metrics import RunMetrics
from trainer.telemetry.status import Phase, StatusWriter, rank_folder
from trainer.telemetry.stop import StopFlag, die_with_parent

flag = StopFlag()
flag.install()
die_with_parent()
rank = int(os.environ["RANK"])
folder = rank_folder(Path(os.environ["TRAINER_RUNTIME_DIR"]), rank)
writer = StatusWriter(folder, ranks=int(os.environ["RANKS"]), interval_seconds=0.02)
metrics = RunMetrics(folder)
metrics.write()
for step in range(100000):
    writer.beat(Phase.TRAIN, step=step, total=100000, item_done=True)
    if flag.requested is not None:
        (folder / "saved").write_text(flag.requested.name)
        sys.exit(flag.requested)
    time.sleep(0.02)
"""
AGREED = CHILD.replace(
    "        sys.exit(flag.requested)",
    """        run = folder.parent if rank else folder
        parts = [rank_folder(run, one) for one in range(int(os.environ["RANKS"]))]
        while not all((part / "saved").exists() for part in parts):
            time.sleep(0.02)
        sys.exit(flag.requested)""",
)
"""A child as one that saves with all others: none ends before each was asked."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A running supervisor."""

    process: subprocess.Popen[str] | Forked
    directory: Path
    port: int
    meminfo: Path
    memory_events: Path

    def status(self, rank: int = 0) -> Status | None:
        return read_status(rank_folder(self.directory, rank))

    def child(self, rank: int = 0) -> int:
        """The pid of a child once it trains."""

        def training() -> int | None:
            status = self.status(rank)
            return status.pid if status is not None and status.phase is Phase.TRAIN else None

        return wait_for(training)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP answer."""
        with contextlib.suppress(ConnectionError):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()
        raise AssertionError("the server did not answer")

    def end(self) -> tuple[int, str]:
        """Exit code and stderr of the supervisor."""
        _, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, errors


def wait_for(look: Callable[[], T | None]) -> T:
    """The first answer of `look` that is not None."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        answer = look()
        if answer is not None:
            return answer
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def write_meminfo(path: Path, gib: float) -> None:
    partial = path.with_suffix(".new")
    partial.write_text(f"MemTotal: 127000000 kB\nMemFree: 1 kB\nMemAvailable:   {int(gib * 1024**2)} kB\n")
    partial.replace(path)


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start supervisors; whatever is left of them is killed at the end."""
    with supervisors(tmp_path, _popen) as starter:
        yield starter


@pytest.fixture
def fork(tmp_path: Path, warm: Nursery) -> Iterator[Start]:
    """`start` of processes that are forked, supervisors and children: for what is not about their start."""

    def forked(words: list[str]) -> Forked:
        return warm.start(words, {**os.environ, ALL_RANKS: "1"})

    with supervisors(tmp_path, forked) as starter:
        yield starter


def _popen(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def supervisors(
    folder: Path, begin: Callable[[list[str]], subprocess.Popen[str] | Forked]
) -> Iterator[Start]:
    """A function that starts supervisors by `begin`, and their ends."""
    runs: list[Run] = []

    def starter(
        *,
        child: str = CHILD,
        directory: Path = folder / "runtime",
        port: int | None = None,
        unified_memory: bool = False,
        budget_scale: float = 1.0,
        save_seconds: float | None = None,
        ranks: int = 1,
        only: int | None = None,
    ) -> Run:
        """`only`: the rank of `ranks` that this supervisor has, as a launcher's does; `save_seconds`: the
        budget of saving, in place of half an hour.
        """
        meminfo, events = folder / "meminfo", folder / "memory.events"
        if not meminfo.exists():
            write_meminfo(meminfo, 64)
            events.write_text("low 0\noom 3\noom_kill 3\n")
        port = free_port() if port is None else port
        asked = {
            "child": child,
            "runtime_dir": str(directory),
            "meminfo_path": str(meminfo),
            "memory_events_path": str(events),
            "port": port,
            "unified_memory": unified_memory,
            "ranks": ranks,
            "only": only,
            "limits": {"interval_seconds": 0.05, "budget_scale": budget_scale},
            "save_seconds": save_seconds,
        }
        process = begin(["-c", PARENT, json.dumps(asked)])
        run = Run(process=process, directory=directory, port=port, meminfo=meminfo, memory_events=events)
        runs.append(run)
        return run

    yield starter
    for run in runs:
        _clear(run)


def _clear(run: Run) -> None:
    run.process.terminate()
    status = run.status()
    try:
        run.process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        run.process.kill()
    if status is not None and status.pid != run.process.pid and status.exit_code is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(status.pid, signal.SIGKILL)
    run.process.communicate()
