"""Steps of the real training loop: a small data set, `trainer train`, its metrics.jsonl. No torch."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.record import REPOSITORY
from bench.watch import Watch
from trainer import families
from trainer.config import environment
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics

# `auto` compiles only runs that are long enough to gain by it, which a measurement is not
OURS: dict[str, Mapping[str, Any]] = {
    "ours": {"compile": True},
    "ours-bf16": {"weights": "bf16", "compute": "bf16", "compile": True},
    "ours-fp8": {"weights": "fp8", "compute": "fp8", "compile": True},
    "ours-int8": {"weights": "int8", "compile": True},
    "ours-nf4": {"weights": "nf4"},
}
"""The `features` that each variant asks for; everything else is the plan's choice."""
_GIB = 1024**3
_PICTURES, _CONVERSATIONS = 4, 64
_WORDS = ("amber", "bridge", "cloud", "desert", "ember", "forest", "garden", "harbour", "island", "jungle")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is the same for every variant of one command."""

    family: str
    base: Path
    resolution: int
    batch: int
    rank: int
    tokens: int
    steps: int
    warmup: int
    overrides: tuple[str, ...]
    """Further KEY=VALUE for `--set`, of ours only."""


def write_data_set(family_name: str, folder: Path, *, resolution: int, tokens: int) -> dict[str, Any]:
    """Write pictures (or conversations) of the run's size; gives the entry of `data.sets`.

    A caption has more words than the run takes tokens, so that each is cut to the same length.
    """
    family, words = families.get(family_name), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    if family.sample_kind == "conversation":
        path = folder / "chat.jsonl"
        path.write_text("".join(_conversation(words, tokens // 12) for _ in range(_CONVERSATIONS)))
        return {"chat_file": str(path)}
    from PIL import Image

    kinds = ["pictures", *(["controls"] if family.control_counts[0] else [])]
    for kind in kinds:
        (folder / kind).mkdir(exist_ok=True)
        for number in range(_PICTURES):
            noise = Image.frombytes("RGB", (16, 16), words.randbytes(16 * 16 * 3))
            noise.resize((resolution, resolution)).save(folder / kind / f"{number}.png")
    for number in range(_PICTURES):
        caption = " ".join(words.choice(_WORDS) for _ in range(tokens + 8))
        (folder / "pictures" / f"{number}.txt").write_text(caption)
    sets = {"img_dir": str(folder / "pictures")}
    return sets | ({"control_dir": str(folder / "controls")} if len(kinds) > 1 else {})


def _conversation(words: random.Random, length: int) -> str:
    """One line of a chat file, of about `length` words in all."""
    half = max(1, words.randint(length // 2, length) // 2)
    texts = [" ".join(words.choice(_WORDS) for _ in range(half)) for _ in range(2)]
    messages = [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
    return json.dumps({"messages": messages}) + "\n"


def layer(job: Job, variant: str, data_set: Mapping[str, Any], cache_dir: Path) -> dict[str, Any]:
    """The configuration that is laid over the family's shipped one."""
    steps = job.steps + job.warmup
    return {
        "model": {"pretrained_model_name_or_path": str(job.base.resolve()), "weights": "random"},
        "data": {
            "resolution": job.resolution,
            "max_sequence_length": job.tokens,
            "caption_dropout_rate": 0.0,
            "cache_dir": str(cache_dir),
            "sets": [dict(data_set)],
        },
        "lora": {"rank": job.rank, "alpha": job.rank, "target_modules": "attention"},
        "train": {
            "max_train_steps": steps,
            "train_batch_size": job.batch,
            "gradient_accumulation_steps": 1,
            "lr_warmup_steps": 0,
            "log_every_steps": 1,
        },
        "features": dict(OURS[variant]),
        "validation": {"prompts": [], "control_images": [], "held_out": 0, "every_steps": steps + 1},
        "checkpoint": {"checkpointing_steps": steps + 1},
    }


def train(job: Job, variant: str, folder: Path, shared: Path, *, memory: bool = False) -> dict[str, Any]:
    """One run in processes of its own; gives its figures, `problem` where it did not end well.

    `folder` must be new; data set and encoded samples lie in `shared`. With `memory` the driver is asked what
    is in use.
    """
    folder.mkdir(parents=True)
    data_set = write_data_set(job.family, shared / "data", resolution=job.resolution, tokens=job.tokens)
    content = layer(job, variant, data_set, shared / "cache")
    (folder / "layer.yaml").write_text(yaml.safe_dump(content))
    run = folder / "run"
    command = [sys.executable, "-m", "trainer", "train", *configs(job, folder), "--output", str(run)]
    for override in job.overrides:
        command += ["--set", override]
    with Watch(run / METRICS_LOG, memory=memory) as watch:
        runtime = {"TRAINER_RUNTIME_DIR": str(folder / "runtime"), "TRAINER_METRICS_PORT": str(_free_port())}
        code, host_gib = run_child(command, folder / "log.txt", runtime)
    if code != 0:
        tail = (folder / "log.txt").read_text(errors="replace").strip().splitlines()[-12:]
        print("\n".join(tail), file=sys.stderr)
        return {"problem": f"exit code {code}"}
    rows = read_metrics(run / METRICS_LOG)
    return {
        **figures(rows, job.steps),
        **planned(run / "plan.json"),
        "host_gib": host_gib,
        "first_step_seconds": watch.first_step_seconds,
        "device_gib": watch.device_gib,
    }


def configs(job: Job, folder: Path) -> list[str]:
    """Configuration files of a run, the lowest layer first."""
    return [str(REPOSITORY / "train_configs" / f"{job.family}_lora.yaml"), str(folder / "layer.yaml")]


def figures(rows: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Milliseconds of the last `steps` steps and peak memory, from the rows of a metrics.jsonl.

    Raises ValueError where a row stands for several steps, or there are too few.
    """
    trained = [row for row in rows if "seconds_per_step" in row]
    numbers = [row["step"] for row in trained]
    if numbers != list(range(1, len(numbers) + 1)) or len(numbers) < steps:
        raise ValueError(f"the log has lines for steps {numbers}, not one for each of {steps} or more")
    result: dict[str, Any] = {"times": [1e3 * row["seconds_per_step"] for row in trained[-steps:]]}
    peak = max(row.get("device_memory_peak_bytes", 0) for row in trained)
    if peak:
        result["allocated_gib"] = peak / _GIB
        # runs of older versions logged what was held at the log steps only
        held = ("device_memory_reserved_peak_bytes", "device_memory_reserved_bytes")
        result["reserved_gib"] = max(row.get(name, 0) for row in trained for name in held) / _GIB
    return result


def planned(path: Path) -> dict[str, Any]:
    """What the plan of a run predicted and decided."""
    plan = json.loads(path.read_text())
    names: tuple[str, ...] = ("weights", "compile", "attention", "activation_checkpointing")
    if plan["compute"] == "fp8":
        names += ("weight_copies",)
    if plan["modulation"]:
        names += ("modulation",)
    chosen = [f"{name.replace('_', ' ')} {_word(plan[name])}" for name in names]
    if plan["recomputed_blocks"]:
        chosen.append(f"the first {plan['recomputed_blocks']} blocks recomputed")
    if plan["swapped_blocks"]:
        chosen.append(f"{plan['swapped_blocks']} blocks wait in host memory")
    if plan["activation_budget"] != 1.0:
        chosen.append(f"activation budget {plan['activation_budget']}")
    result: dict[str, Any] = {"settings": ", ".join(chosen), "precision": plan["compute"]}
    if plan["device"] != "cpu":
        result["planned_gib"] = sum(row["bytes"] for row in plan["train_memory"]) / _GIB
    return result


def _word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _free_port() -> int:
    """A port for the run's server, which is part of what is measured: another run may hold the usual one."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_child(
    command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
) -> tuple[int, float]:
    """Run a command to its end with both outputs in `log`; gives the exit code and the host's peak in GiB.

    The peak is the resident set of the largest process among the child and its own children.
    """
    environ = {**environment.snapshot(), **(variables or {})}
    with log.open("wb") as file:
        child = subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdout=file, stderr=subprocess.STDOUT)
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except KeyboardInterrupt:
            child.terminate()  # by its id; the run saves and ends
            child.wait()
            raise
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * 1024 / _GIB
