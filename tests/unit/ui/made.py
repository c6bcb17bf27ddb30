"""Run folders as a run writes them, by the trainer's own writers, without training."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from trainer.errors import Problem
from trainer.telemetry import locks
from trainer.telemetry.run_folder import process, tries
from trainer.telemetry.run_folder.tries import Try
from trainer.telemetry.rundir import LOCK_FILE
from trainer.telemetry.sinks.records import MetricsLog, StepRecord, ValidationRecord
from trainer.telemetry.status import LOCK_FILE as RUNTIME_LOCK
from trainer.telemetry.status import Phase, StatusWriter

CONFIG = """family: {family}
method: lora
data:
  sets:
  - img_dir: /data/cats
train:
  max_train_steps: {steps}
  num_train_epochs: null
  gradient_accumulation_steps: 2
output_dir: {folder}
"""
PLAN = {
    "decisions": [
        {"feature": "weights", "value": "int8", "source": "auto", "reason": "bf16 does not fit: 31.2 GiB"},
        {"feature": "compile", "value": "on", "source": "auto", "reason": "1 200 micro-batches gain 300 s"},
    ],
    "train_memory": [
        {"name": "base", "bytes": 12 * 2**30, "detail": "int8"},
        {"name": "activations", "bytes": 4 * 2**30, "detail": ""},
    ],
    "cache_memory": [],
    "host_memory": [],
    "budget_bytes": 22 * 2**30,
    "disk_bytes": 2**30,
    "step_milliseconds": 250.0,
    "accumulation_steps": 2,
    "ranks": 1,
    "warnings": [],
}


def step_record(step: int, steps: int = 300) -> StepRecord:
    """A log step of a plausible run: the loss falls, the cosine ends at 0."""
    noise = math.sin(step * 1.7) * 0.02 + math.sin(step * 0.6) * 0.015
    return StepRecord(
        step=step,
        loss=0.18 + 0.55 * math.exp(-step / 60) + noise,
        learning_rate=1e-4 * (1 + math.cos(math.pi * step / steps)) / 2,
        grad_norm=0.4 + 2 * math.exp(-step / 30) + abs(noise) * 3,
        seconds_per_step=0.52 + noise / 2,
        samples_per_second=3.8,
        device_memory_peak_bytes=15 * 2**30,
        device_memory_reserved_bytes=int((15.2 + 0.4 * (1 - math.exp(-step / 40))) * 2**30),
        device_memory_reserved_peak_bytes=int(15.6 * 2**30),
    )


def write_metrics(folder: Path, steps: Sequence[int], total: int = 300) -> None:
    """Append log steps to metrics.jsonl, and a held-out loss every 100 steps."""
    log = MetricsLog(folder / "metrics.jsonl")
    for step in steps:
        log.record(step_record(step, total))
        if step % 100 == 0:
            loss = 0.22 + 0.6 * math.exp(-step / 70)
            log.record(ValidationRecord(step=step, validation_loss=loss, validation_data="a"))
    log.close()


def make_run(
    folder: Path,
    *,
    steps: int = 300,
    done: int = 120,
    every: int = 10,
    family: str = "tiny",
    plan: bool = True,
) -> Path:
    """A run that has begun and done so many steps; nobody trains in it."""
    folder.mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text(CONFIG.format(family=family, steps=steps, folder=folder))
    if plan:
        (folder / "plan.json").write_text(json.dumps(PLAN))
    write_metrics(folder, range(every, done + 1, every), steps)
    log(folder, "info", f"run folder {folder}")
    log(folder, "info", f"step {done}/{steps}")
    return folder


def log(folder: Path, level: str, message: str) -> None:
    """Append a line to log.jsonl."""
    row = {"time": "2026-11-27T16:05:12.000+00:00", "level": level, "logger": "trainer", "message": message}
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def checkpoint(folder: Path, step: int) -> None:
    """A checkpoint as its name and some bytes."""
    path = folder / f"checkpoints/step-{step:06d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text("{}")


def result(folder: Path) -> None:
    """A LoRA as the run leaves it."""
    (folder / "lora").mkdir()
    (folder / "lora" / f"{folder.name}.safetensors").write_bytes(bytes(2**20))


def samples(folder: Path, step: int, pictures: Sequence[Image.Image], prompts: Sequence[str]) -> None:
    """Previews of a step with their prompts inside, and the row of them."""
    inner = folder / f"samples/step-{step:06d}"
    inner.mkdir(parents=True)
    for number, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        texts = PngInfo()
        texts.add_itxt("prompt", prompt)
        picture.save(inner / f"{number:02d}.png", pnginfo=texts)
    pictures[0].save(inner.with_suffix(".png"))


def tried(folder: Path, number: int, one: Try, pictures: Sequence[Image.Image] = ()) -> Path:
    """A try of a run with its record, and the first of its pictures, column by column; gives its folder."""
    place = folder / f"tries/{number}"
    place.mkdir(parents=True)
    (place / tries.RECORD).write_text(tries.to_json(one))
    for count, picture in enumerate(pictures):
        drawn(place, *divmod(count, len(one.prompts)), picture)
    return place


def drawn(place: Path, column: int, row: int, picture: Image.Image) -> None:
    """One picture of the try in `place`."""
    path = tries.picture(place, column, row)
    path.parent.mkdir(exist_ok=True)
    picture.save(path)


def ended(folder: Path, code: int, *, cause: str = "", problems: Sequence[Problem] = ()) -> None:
    """An end that the supervisor recorded, which is this process."""
    process.begin(folder, supervisor=os.getpid(), runtime_dir=folder / "nowhere")
    process.end(folder, supervisor=os.getpid(), exit_code=code, cause=cause, problems=problems)


@contextlib.contextmanager
def running(
    folder: Path, runtime: Path, phase: Phase = Phase.TRAIN, *, step: int, steps: int
) -> Iterator[StatusWriter]:
    """Hold the locks of a run's training process and its supervisor, and beat once."""
    runtime.mkdir(exist_ok=True, parents=True)
    taken = Problem(what="taken")
    with contextlib.ExitStack() as locked:
        for path in (folder / LOCK_FILE, runtime / RUNTIME_LOCK):
            held = locks.holding(path, supervisor=os.getpid(), taken=taken, on_wait=lambda text: None)
            locked.enter_context(held)
        process.begin(folder, supervisor=os.getpid(), runtime_dir=runtime)
        status = StatusWriter(runtime)
        status.beat(phase, step=step, total=steps, median_step_seconds=0.5)
        yield status
