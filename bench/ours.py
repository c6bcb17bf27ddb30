"""Steps of the real training loop: a small data set, `trainer train`, its metrics.jsonl. No torch.

Seen from outside besides: when the first step was logged, and device memory in use.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench import jobs, processes
from bench.processes import GIB, REPOSITORY, Ended
from trainer import families
from trainer.config import environment
from trainer.families.values import Shape
from trainer.machine import idle
from trainer.telemetry.figures import of_steps
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics

# `auto` compiles only runs that are long enough to gain by it, which a measurement is not
OURS: dict[str, Mapping[str, Any]] = {
    "ours": {"compile": True},
    "ours-bf16": {"weights": "bf16", "compute": "bf16", "compile": True},
    "ours-fp8": {"weights": "fp8", "compute": "fp8", "compile": True},
    "ours-int8": {"weights": "int8", "compile": True},
    "ours-nf4": {"weights": "nf4"},
    "ours-eager": {"weights": "bf16", "compute": "bf16", "compile": False},
}
"""The `features` that each variant asks for; everything else is the plan's choice."""
_PICTURES, _CONVERSATIONS = 4, 64
_PAUSE_SECONDS = 0.25
# asking the driver takes its lock: seldom enough not to be seen in a step
_MEMORY_EVERY = 8
_WORDS = ("amber", "bridge", "cloud", "desert", "ember", "forest", "garden", "harbour", "island", "jungle")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The part of a measurement that is the same for every variant of one command."""

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
    method: str = "lora"
    hosts: int = 1
    """Stand-ins for hosts that share the GPUs."""

    @property
    def shape(self) -> Shape:
        """One step's batch."""
        return Shape(
            batch_size=self.batch,
            width=self.resolution,
            height=self.resolution,
            text_tokens=self.tokens,
            bytes_per_value=2,
            controls=families.get(self.family).control_counts[0],
        )


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
    features = dict(OURS[variant])
    if job.method == "full" and features.get("compute") == "fp8":
        del features["weights"]  # trained weights are bf16 themselves
    content = base_layer(job.base, data_set, cache_dir, features, steps=steps, batch=job.batch)
    content["data"] |= {
        "resolution": job.resolution,
        "max_sequence_length": job.tokens,
        "caption_dropout_rate": 0.0,
    }
    if job.method == "lora":
        content["lora"] = {"rank": job.rank, "alpha": job.rank, "target_modules": "attention"}
    content["checkpoint"] = {"checkpointing_steps": steps + 1}
    content["parallel"] = {"gpus": 1}  # as others train; a command's own `--set` lies above it
    return content


def base_layer(
    base: Path,
    data_set: Mapping[str, str],
    cache_dir: Path,
    features: Mapping[str, Any],
    *,
    steps: int,
    batch: int,
    accumulation: int = 1,
) -> dict[str, Any]:
    """Random weights, one data set, a line of the log for each step, no previews and no held-out losses."""
    return {
        "model": {"pretrained_model_name_or_path": str(base.resolve()), "weights": "random"},
        "data": {"sets": [dict(data_set)], "cache_dir": str(cache_dir)},
        "train": {
            "max_train_steps": steps,
            "train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "lr_warmup_steps": 0,
            "log_every_steps": 1,
        },
        "features": dict(features),
        "validation": {"prompts": [], "control_images": [], "held_out": 0, "every_steps": 10_000},
    }


def train(
    job: Job,
    variant: str,
    folder: Path,
    shared: Path,
    *,
    memory: bool = False,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One run in processes of its own; gives its figures, `problem` where it did not end well.

    `folder` must be new; data set and encoded samples lie in `shared`. Weights that the run wrote are removed
    again, but a LoRA. With `memory` the driver is asked what is in use. Without `environ` it is that of this
    process.
    """
    folder.mkdir(parents=True)
    data_set = write_data_set(job.family, shared / "data", resolution=job.resolution, tokens=job.tokens)
    content = layer(job, variant, data_set, shared / "cache")
    (folder / "layer.yaml").write_text(yaml.safe_dump(content))
    run = folder / "run"
    with watch(run / METRICS_LOG, memory=memory) as seen:
        own, port = environ or environment.snapshot(), _free_port()
        ended = jobs.train(configs(job, folder), run, job.overrides, own, port, hosts=job.hosts)
    for large in ("model", "checkpoints"):  # of a whole model 20 GiB each, and nobody looks at them
        shutil.rmtree(run / large, ignore_errors=True)
    if ended.code:
        return problem(ended)
    rows = read_metrics(run / METRICS_LOG)
    return {**of_steps(rows, job.steps), **planned(run / "plan.json"), "host_gib": ended.host_gib, **seen}


def problem(ended: Ended) -> dict[str, Any]:
    """The figures of a run that failed: its problem; its last lines go to stderr."""
    print("\n".join(ended.said.strip().splitlines()[-12:]), file=sys.stderr)
    return {"problem": f"exit code {ended.code}"}


def configs(job: Job, folder: Path) -> list[Path]:
    """Configuration files of a run, the lowest layer first."""
    return [REPOSITORY / "train_configs" / f"{job.family}_{job.method}.yaml", folder / "layer.yaml"]


def planned(path: Path) -> dict[str, Any]:
    """Settings, precision and memory that the plan of a run decided and predicted."""
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
    if plan["sharded_blocks"]:
        chosen.append(f"{plan['sharded_blocks']} blocks over {plan['shard_group']} GPUs")
    if plan["activation_budget"] != 1.0:
        chosen.append(f"activation budget {plan['activation_budget']}")
    result: dict[str, Any] = {"settings": ", ".join(chosen), "precision": plan["compute"]}
    if plan["device"] != "cpu":
        result["planned_gib"] = sum(row["bytes"] for row in plan["train_memory"]) / GIB
    return result


def _word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _free_port() -> int:
    """A port for the run's server, which is part of what is measured: another run may hold the usual one."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def watch(log: Path, *, memory: bool = False) -> Iterator[dict[str, float | None]]:
    """Look at a run from outside, while it runs; gives two figures.

    `first_step_seconds`: from the start until the log had a line, to a quarter of a second; None before.
    `device_gib`: most memory of the GPU in use, by the driver, asked every two seconds if at all.
    """
    seen: dict[str, float | None] = {"first_step_seconds": None, "device_gib": None}
    started, looked = time.monotonic(), itertools.count()

    def look() -> None:
        if seen["first_step_seconds"] is None and log.is_file() and log.stat().st_size:
            seen["first_step_seconds"] = time.monotonic() - started
        if memory and next(looked) % _MEMORY_EVERY == 0:
            found = idle.read_gpu()
            if found is not None and found[0].used_mib is not None:
                seen["device_gib"] = max(seen["device_gib"] or 0.0, found[0].used_mib / 1024)

    with processes.meanwhile(look, _PAUSE_SECONDS):
        yield seen
