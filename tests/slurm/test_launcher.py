"""`trainer queue` with a real Slurm: jobs are added, listed, stopped, released, and end as they end."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import PATIENCE_SECONDS, ROOT, SLOW, Slurm

pytestmark = pytest.mark.slurm
STAND_IN = f"{sys.executable} -m tests.slurm.stand_in"
Queue = Callable[..., str]


@pytest.fixture
def queue(cluster: Slurm, tmp_path: Path) -> Queue:
    """`trainer queue`, with a queue of its own, whose jobs run the stand-in."""

    def trainer(*words: str, **variables: str) -> str:
        own = {"TRAINER_QUEUE_DIR": str(tmp_path / "queue"), "LAUNCH": STAND_IN, "TRAINER_PROFILE": "cpu"}
        return cluster.ask(sys.executable, "-m", "trainer", "queue", *words, **own | variables)

    return trainer


def added(queue: Queue, run: Path, *options: str, **variables: str) -> str:
    """The name of a job of the quickstart's configuration."""
    words = ("add", "train_configs/quickstart.yaml", "--output", str(run))
    (name,) = re.findall(r"^job (slurm-\d+): ", queue(*words, *options, **variables), re.MULTILINE)
    return str(name)


def row(queue: Queue, name: str, state: str) -> str:
    """The job's row once its state is this one."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        (line,) = [line for line in queue("list").splitlines() if line.startswith(name)]
        if re.match(rf"{name} +\S+ +{state}\b", line):
            return line
        assert time.monotonic() < end, line
        time.sleep(0.2)


def test_a_job_is_stopped_held_released_and_finished(cluster: Slurm, queue: Queue, tmp_path: Path) -> None:
    name = added(queue, tmp_path / "cats", "--slurm=--nodes=2 --exclusive", CODES=";0,0")
    job = name.removeprefix("slurm-")
    row(queue, name, "running")
    while queue("log", name).count("begins") < 2:
        time.sleep(0.2)
    queue("stop", name)
    assert "held state" in row(queue, name, "held")
    assert queue("log", name).count("saved") == 2
    queue("hold", name, "--release")
    cluster.start_now(job)
    row(queue, name, "finished")
    assert f'"train", "{tmp_path}/cats/slurm/config.yaml"' in queue("log", name)
    # what lies over files here is written in the configuration already
    assert "TRAINER__" not in queue("log", name)
    queue("stop", name, "--forget")
    assert queue("list").strip() == "no jobs"


def test_a_job_whose_nodes_get_ready_is_stopped(cluster: Slurm, queue: Queue, tmp_path: Path) -> None:
    """There is no step yet that a signal would reach."""
    slow = cluster.folder / SLOW
    slow.touch()
    try:
        name = added(queue, tmp_path / "cats", "--slurm=", CODES=";0")
        row(queue, name, "running")
        queue("stop", name)
    finally:
        slow.unlink()
    assert "held state" in row(queue, name, "held")
    assert "begins" not in queue("log", name)
    queue("hold", name, "--release")
    cluster.start_now(name.removeprefix("slurm-"))
    row(queue, name, "finished")


def test_a_job_waits_with_slurms_reason_and_fails_with_its_code(queue: Queue, tmp_path: Path) -> None:
    held = added(queue, tmp_path / "held", "--slurm=", "--held", CODES="70")
    assert "JobHeld" in row(queue, held, "held")
    waits = added(queue, tmp_path / "waits", "--slurm=--begin=now+1hour")
    assert "Slurm: BeginTime" in row(queue, waits, "waiting")
    queue("stop", waits)
    assert "JobHeld" in row(queue, waits, "held")
    queue("hold", held, "--release")
    assert "exit code 70: the loss or a gradient became NaN" in row(queue, held, "failed")


def test_what_slurm_refuses_is_told_in_its_words(cluster: Slurm, queue: Queue, tmp_path: Path) -> None:
    before = cluster.ask("squeue", "--noheader", "--states=all", "--format=%i").split()
    with pytest.raises(AssertionError, match="invalid partition specified: nowhere"):
        added(queue, tmp_path / "cats", "--vary", "lora.rank=4,8", "--slurm=--partition=nowhere")
    assert queue("list").strip() == "no jobs"
    assert cluster.ask("squeue", "--noheader", "--states=all", "--format=%i").split() == before


def test_slurm_gives_gpus_by_the_configuration(cluster: Slurm, queue: Queue, tmp_path: Path) -> None:
    words = ("--set", "parallel.gpus=2", "--slurm=--nodes=2", "--held")
    name = added(queue, tmp_path / "cats", *words, TRAINER_PROFILE="generic-cuda")
    told = cluster.ask("scontrol", "show", "job", name.removeprefix("slurm-"))
    assert "gres:gpu:2" in told and f"WorkDir={ROOT}" in told


def test_gpus_that_the_user_names_are_what_slurm_gives(cluster: Slurm, queue: Queue, tmp_path: Path) -> None:
    name = added(queue, tmp_path / "cats", "--slurm=--gres=gpu:2", "--held", TRAINER_PROFILE="generic-cuda")
    told = cluster.ask("scontrol", "show", "job", name.removeprefix("slurm-"))
    assert "TresPerNode=gres:gpu:2" in told
