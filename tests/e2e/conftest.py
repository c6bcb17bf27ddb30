"""Real runs in real processes: `trainer train`, its supervisor and the process that trains."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from tests.contract.runs import CASES, CPU_FACTS, ROOT, Case, Workshop, small_samples
from tests.e2e.launching import Wrapped
from tests.e2e.nursery import ALL_RANKS, Forked, Nursery, nurseries
from tests.ports import free_port
from trainer.telemetry.status import Phase, Status, read_status

PATIENCE_SECONDS = 120.0
PLAIN_CASES = CASES[:2]
PLAIN_KEYS = (
    "parallel.gpus=", "validation.", "checkpoint.", "train.max_train_steps=", "train.adam_epsilon=",
    "train.train_batch_size=", "train.gradient_accumulation_steps=", "train.log_every_steps=",
)  # fmt: skip
"""Keys that runs of these cases may set: `make test` has compared such ranks in processes of their own."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Process:
    """A `trainer` that was started."""

    popen: subprocess.Popen[str] | Forked
    run_dir: Path
    runtime: Path
    cache: Path
    port: int
    answers: list[str] = field(default_factory=list)
    """The texts of /metrics, one per request."""
    printed: list[str] = field(default_factory=list)
    """The process's whole stderr, once it has ended."""

    def status(self) -> Status | None:
        return read_status(self.runtime)

    def child(self) -> int:
        """The pid of the process that trains."""

        def beating() -> int | None:
            status = self.status()
            return status.pid if status is not None and status.pid != self.popen.pid else None

        return self.wait_for(beating)

    def wait_for(self, look: Callable[[], T | None]) -> T:
        """The first answer of `look` that is not None; fails when the run ends before."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            answer = look()
            if answer is not None:
                return answer
            if self.popen.poll() is not None:
                raise AssertionError(f"ended with {self.popen.returncode}: {self.popen.communicate()[1]}")
            time.sleep(0.005)
        raise AssertionError("waited in vain")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        self.wait_for(lambda: True if condition() else None)

    def wait_for_phase(self, phase: Phase, *, step: int = 0) -> None:
        def there() -> bool:
            status = self.status()
            return status is not None and status.phase is phase and (status.step or 0) >= step

        self.wait_until(there)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP answer; (0, "") where there is no server yet or any more."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (urllib.error.URLError, ConnectionError):
            return 0, ""

    def end(self, patience_seconds: float = PATIENCE_SECONDS) -> tuple[int, str]:
        """Exit code and everything that was printed."""
        _, errors = self.popen.communicate(timeout=patience_seconds)
        self.printed.append(errors)
        return self.popen.returncode, errors


class Start(Protocol):
    def __call__(
        self,
        case: Case,
        folder: Path,
        *overrides: str,
        knobs: dict[str, Any] | None = None,
        cache: Path | None = None,
        launcher: Wrapped | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Process: ...


def _command(arguments: Sequence[str], knobs: dict[str, Any] | None, launcher: Wrapped | None) -> list[str]:
    module = ["trainer"] if knobs is None else ["tests.e2e.harness", json.dumps(knobs)]
    words = ["-m", *module, *arguments]
    return [sys.executable, *words] if launcher is None else launcher(words)


def common_environment() -> dict[str, str]:
    """This process's environment without what concerns another run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "default",  # libraries' warnings that Python would hide
    }


def environment(folder: Path, port: int, cache: Path) -> dict[str, str]:
    """The environment of a run."""
    return common_environment() | {
        "TRAINER_FACTS": str(CPU_FACTS),
        "TRAINER_RUNTIME_DIR": str(folder / "runtime"),
        "TRAINER_CACHE_DIR": str(cache),
        "TRAINER_METRICS_PORT": str(port),
    }


@contextlib.contextmanager
def starting(
    workshop: Workshop, nursery: Callable[[], Nursery] | None = None, *, all_ranks: bool = False
) -> Iterator[Start]:
    """Starts runs, with more `variables` in their environment, those without a launcher from a nursery if
    there is one, with `all_ranks` of them, and launchers too; whatever is left at the end is killed.
    """
    started: list[Process] = []

    def start(
        case: Case,
        folder: Path,
        *overrides: str,
        knobs: dict[str, Any] | None = None,
        cache: Path | None = None,
        launcher: Wrapped | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Process:
        port = free_port()
        cache = cache or workshop.cache
        config = workshop.write_config(case, folder)
        arguments = ["train", str(config), *(word for text in overrides for word in ("--set", text))]
        command = _command(arguments, knobs, launcher)
        environ = environment(folder, port, cache) | dict(variables or {})
        popen: subprocess.Popen[str] | Forked
        if nursery is not None and (launcher is None or all_ranks):
            is_plain = case in PLAIN_CASES and all(one.startswith(PLAIN_KEYS) for one in overrides)
            forks_all = all_ranks or is_plain
            popen = nursery().start(command[1:], environ | ({ALL_RANKS: "1"} if forks_all else {}))
        else:
            popen = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
        runtime = folder / "runtime"
        process = Process(popen=popen, run_dir=folder / "run", runtime=runtime, cache=cache, port=port)
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            status = process.status()
            if process.popen.poll() is None:
                process.popen.kill()
                if status is not None and status.pid != process.popen.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(status.pid, signal.SIGKILL)
            process.popen.communicate()


@pytest.fixture(scope="session")
def yard(tiny_base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Bases, pictures and cache of all real runs."""
    folder = tmp_path_factory.mktemp("yard")
    return Workshop(base=tiny_base, samples=small_samples(folder / "samples"), cache=folder / "cache")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Callable[..., Nursery]]:
    with nurseries(common_environment()) as another:
        yield another


def is_slow(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("slow") is not None


@pytest.fixture
def start(yard: Workshop, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start a run of a case in a folder; the same folder again resumes it. Slow tests fork it."""
    if is_slow(request):
        yield request.getfixturevalue("fork")
        return
    with starting(yard) as starter:
        yield starter


@pytest.fixture
def fork(yard: Workshop, nursery: Callable[..., Nursery], request: pytest.FixtureRequest) -> Iterator[Start]:
    """Fork a run as `start` starts one, for tests of how runs end."""
    with starting(yard, functools.partial(nursery, alternate=is_slow(request))) as starter:
        yield starter


@pytest.fixture
def fork_ranks(
    yard: Workshop, nursery: Callable[..., Nursery], request: pytest.FixtureRequest
) -> Iterator[Start]:
    """Fork runs and launchers with all ranks, for what neither a start nor the order of hashes decides.

    Two starts in turn come from different nurseries: ranks of two hosts have other orders of hashes.
    """
    own = functools.partial(nursery, alternate=is_slow(request))
    with starting(yard, own, all_ranks=True) as starter:
        yield starter


@pytest.fixture(scope="session")
def uninterrupted(
    yard: Workshop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Case], Process]]:
    """The run of a case from start to end, with its metrics and health read all the while. Read only."""
    made: dict[Case, Process] = {}
    with starting(yard) as starter:

        def run(case: Case) -> Process:
            if case not in made:
                process = starter(case, tmp_path_factory.mktemp("uninterrupted"))
                while process.popen.poll() is None:
                    code, text = process.get("/metrics")
                    if code:
                        assert code == 200
                        process.answers.append(text)
                    time.sleep(0.02)
                code, errors = process.end()
                assert code == 0, errors
                made[case] = process
            return made[case]

        yield run


@pytest.fixture(scope="session")
def finished_here(yard: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """The run folder of a case that was trained in this process."""
    import torch

    torch.set_num_threads(1)

    def run(case: Case) -> Path:
        job = yard.job(case, tmp_path_factory.mktemp("here"))
        job.train()
        return job.folder

    return run
