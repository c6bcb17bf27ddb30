"""bench queue: four jobs of a real queue on a CPU, of which one trains, and what is seen from outside."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import queue
from tests.e2e.nursery import Nursery
from tests.unit.bench.test_stops import TINY, rows_of
from trainer.queue.launcher import CPU
from trainer.telemetry.sinks.records import METRICS_LOG


def few_runs(nursery: Nursery) -> SimpleNamespace:
    """The module `subprocess` for the command: forks add jobs, and the first one alone trains."""

    def run(words: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        assert words[0] == sys.executable
        nursery.run(words[1:], env).check_returncode()

    def popen(words: Sequence[str], **rest: Any) -> subprocess.Popen[bytes]:
        assert words[:3] == [sys.executable, "-m", "trainer"]
        script = Path(__file__).with_name("few_runs.py")
        return subprocess.Popen([sys.executable, str(script), *words[3:]], **rest)

    return SimpleNamespace(**{**vars(subprocess), "run": run, "Popen": popen})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_jobs_take_turns(
    given: list[str], tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "subprocess", few_runs(nursery))
    assert queue.main([*given, "--steps", "2", *TINY]) == 0
    rows = rows_of(tmp_path / "record.json")
    assert [(row["job"], row["exit code"], row["proved"], row["steps"]) for row in rows] == [
        (str(number), "0", "yes", "2") for number in range(1, 5)
    ]
    assert {row["as it must"] for row in rows} == {"yes"}
    assert str(tmp_path) not in (tmp_path / "record.json").read_text()


@pytest.mark.parametrize(
    ("sightings", "free", "verdicts"),
    [
        ([{2: "b"}, {1: "a", 2: "b"}, {3: "ab"}, {4: "a"}], 0.5, "yes yes yes yes"),
        (
            [{2: "b"}, {1: "a", 2: "b"}, {3: "ab"}, {4: "a"}],
            2.5,
            "no yes yes yes",
        ),  # another program was there
        ([{2: "b"}, {1: "a", 2: "b"}, {2: "b", 3: "ab"}, {4: "a"}], 0.5, "yes no no yes"),  # one GPU for two
        ([{2: "b"}, {1: "a", 2: "b"}, {4: "a"}, {3: "ab"}], 0.5, "yes yes yes no"),  # out of turn
        ([{2: "b"}, {1: "b"}, {3: "ab"}, {4: "a"}], 0.5, "no yes yes yes"),  # not where it was asked for
        ([{2: "b"}, {1: "a"}, {3: "ab"}], 0.5, "yes yes yes no"),  # never there
    ],
)
def test_what_was_seen_is_judged(
    sightings: list[dict[int, str]], free: float, verdicts: str, tmp_path: Path
) -> None:
    trial = queue.Trial(options=argparse.Namespace(), gpus=["a", "b"], work=tmp_path, free=free, said="waits")
    jobs = [(SimpleNamespace(id=number, start=1), SimpleNamespace(words="")) for number in range(1, 5)]
    local: Any = SimpleNamespace(jobs=lambda: jobs, log=lambda job: "Proved: it loads")
    trial.local = local
    for number in range(1, 5):
        (tmp_path / f"job-{number}/lora").mkdir(parents=True)
        (tmp_path / f"job-{number}/lora/run.safetensors").touch()
        (tmp_path / f"job-{number}" / METRICS_LOG).touch()
    for moment, seen in enumerate(sightings, 1):
        trial.seen.add(float(moment), {job: set(gpus) for job, gpus in seen.items()})
    assert " ".join(row["as it must"] for row in trial.judged()) == verdicts


def process(proc: Path, number: int, **environ: str) -> None:
    (proc / str(number)).mkdir(parents=True)
    entries = [f"{name}={value}".encode() for name, value in environ.items()]
    (proc / str(number) / "environ").write_bytes(b"\0".join([*entries, b"WORD=\xff", b""]))


def test_processes_tell_their_job_and_its_gpus(tmp_path: Path) -> None:
    proc, ours = tmp_path / "proc", tmp_path / "queue"

    def runtime(job: int, folder: Path = ours) -> str:
        return str(folder / "jobs" / str(job) / "runtime")

    process(proc, 1, HOME="/root")
    process(proc, 2, TRAINER_RUNTIME_DIR=runtime(1), CUDA_VISIBLE_DEVICES="GPU-a,GPU-b")
    process(proc, 3, TRAINER_RUNTIME_DIR=runtime(1), CUDA_VISIBLE_DEVICES="GPU-b")
    process(proc, 4, TRAINER_RUNTIME_DIR=runtime(2), CUDA_VISIBLE_DEVICES="")
    process(proc, 5, TRAINER_RUNTIME_DIR=runtime(3, tmp_path / "other"), CUDA_VISIBLE_DEVICES="GPU-a")
    process(proc, 6, TRAINER_RUNTIME_DIR="/tmp/runtime", CUDA_VISIBLE_DEVICES="GPU-a")
    (proc / "7").mkdir()  # it has ended meanwhile
    assert queue.look(ours, proc) == {1: {"GPU-a", "GPU-b"}, 2: {CPU}}


def test_two_jobs_on_one_gpu_are_seen() -> None:
    seen = queue.Seen()
    seen.add(1.0, {1: {"a"}, 2: {"b"}})
    seen.add(2.0, {2: {"b"}, 3: {"a", "b"}})
    seen.add(3.0, {3: {"a"}})
    assert seen.times == {1: [1.0], 2: [1.0, 2.0], 3: [2.0, 3.0]}
    assert seen.together == {(2, 3, "b")}
    assert queue.wishes(["a", "b"]) == [("a",), ("b",), ("a", "b"), ("a",)]
    assert queue.wishes([CPU]) == [(CPU,)] * 4
