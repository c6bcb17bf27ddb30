"""Real runs through the queue: one is stopped and held, the next one is started then, and proved."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.contract.runs import CASES, ROOT, STEPS, Workshop, different, files, numbers, products
from tests.e2e.conftest import PATIENCE_SECONDS, environment
from tests.e2e.nursery import Nursery
from trainer.queue import jobfiles
from trainer.queue.launcher import State
from trainer.queue.local import Local
from trainer.telemetry.status import read_status
from trainer.ui.studio import Studio, identifier
from trainer.ui.views.queueing.jobs import train_on

LORA = CASES[0]
NOT_THE_JOBS = {"TRAINER__TRAIN__MAX_TRAIN_STEPS": "1", "RANK": "1", "WORLD_SIZE": "2"}
"""Variables of the scheduler that would change a run."""


def trainer_of(nursery: Callable[..., Nursery], environ: dict[str, str]) -> Callable[..., str]:
    """The command, which has to end well; gives all that it printed. The queue's own runs are not forked."""

    def trainer(*words: str) -> str:
        ended = nursery(alternate=True).run(["-m", "trainer", *words], environ)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout + ended.stderr

    return trainer


@pytest.mark.slow
def test_a_group_is_run_in_order(yard: Workshop, nursery: Callable[..., Nursery], tmp_path: Path) -> None:
    config = yard.write_config(LORA, tmp_path)
    environ = environment(tmp_path, 0, yard.cache) | {"TRAINER_QUEUE_DIR": str(tmp_path / "queue")}
    trainer = partial(trainer_of(nursery, environ), "queue")
    trainer("add", str(config), "--name", "cats", "--vary", f"train.max_train_steps=100000,{STEPS}")
    config.write_text("edited: later")
    queue = Local(folder=tmp_path / "queue")
    command = [sys.executable, "-m", "trainer", "queue", "run", "--drain"]
    own = environ | NOT_THE_JOBS
    scheduler = subprocess.Popen(command, cwd=ROOT, env=own, stderr=subprocess.PIPE, text=True)
    try:
        runtime = jobfiles.job_folder(queue.folder, 1) / jobfiles.RUNTIME
        end = time.monotonic() + PATIENCE_SECONDS
        # a step of training: what is scanned and encoded is counted too
        while (status := read_status(runtime)) is None or not status.optimizer_step:
            assert time.monotonic() < end and scheduler.poll() is None, queue.log("1")
            time.sleep(0.05)
        first, second = trainer("list").splitlines()[1:3]
        assert re.search(r"running +the CPU", first)  # with its step but while it draws or saves
        assert "waits for the CPU, held by cats-max_train_steps-100000 (job 1)" in second
        trainer("stop", "1")
        _, told = scheduler.communicate(timeout=PATIENCE_SECONDS)
    finally:
        scheduler.kill()
        for job, seen in queue.jobs():
            if seen.state is State.RUNNING:
                queue.stop(str(job.id))
    ends = [line.partition(" (job ")[2][:10] for line in told.splitlines() if "(job" in line]
    # whether a look comes between the request and the end is chance
    assert [one for one in ends if one != "1): stoppi"] == [
        "1): runnin",
        "1): held, ",
        "2): runnin",
        "2): finish",
    ]
    assert list((tmp_path / "run-max_train_steps-100000/checkpoints").glob("step-*"))  # it goes on from there
    assert "Proved: reloaded from disk" in trainer("log", "2", "--lines", "1000")
    rows = (tmp_path / f"run-max_train_steps-{STEPS}/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == STEPS


@pytest.mark.slow
def test_more_steps_from_a_page_are_those_of_a_command(
    yard: Workshop, nursery: Callable[..., Nursery], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps, and three more in the same folder: by the studio and the queue, then by hand."""
    config, run, before = yard.write_config(LORA, tmp_path), tmp_path / "run", tmp_path / "before"
    environ = environment(tmp_path, 0, yard.cache) | {"TRAINER_QUEUE_DIR": str(tmp_path / "queue")}
    trainer = trainer_of(nursery, environ)
    trainer("train", str(config), "--set", "train.max_train_steps=4")
    shutil.copytree(run, before)
    for name in ("TRAINER_QUEUE_DIR", "TRAINER_FACTS"):
        monkeypatch.setenv(name, environ[name])
    folders = dict.fromkeys(("data", "models", "runtime"), tmp_path / "none")
    train_on(Studio(folder=tmp_path / "studio", runs=tmp_path, **folders), identifier(tmp_path, run), "3")
    trainer("queue", "run", "--drain")
    assert "Proved: reloaded from disk" in trainer("queue", "log", "1", "--lines", "1000")
    saved = ("checkpoints/step-000007/*.safetensors",)
    rows, made = numbers(run), products(run) | files(run, *saved)
    assert [row["step"] for row in rows if "loss" in row][-1] == 7 and len(made) > 5
    shutil.rmtree(run)
    before.rename(run)
    trainer("train", str(config), "--set", "train.max_train_steps=7")
    assert numbers(run) == rows
    assert not different(products(run) | files(run, *saved), made)
