"""Profile a training step: the real model and optimizer on a synthetic batch, by kind of kernel.

    python -m bench profile train_configs/flux1_dev_lora.yaml --set model.weights=random \\
        --set model.pretrained_model_name_or_path=BASE --set features.compute=fp8 --steps 3

The plan and the model are made as `trainer train` makes them, in a process with the plan's environment;
no data set is read. `--blocks 2,4` cuts the model to its first blocks for quick experiments (then the
weights are random). Steps are timed without the profiler first.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import arguments as types
from bench import jobs
from bench.processes import GIB
from bench.trace import read_trace, summarize, summary_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan here, profile in a child that has the plan's environment; the exit code is the child's."""
    parser = types.command_parser("profile", __doc__)
    add = parser.add_argument
    add("configs", nargs="+", type=lambda text: Path(text).resolve(), metavar="CONFIG")
    types.add_common(parser, "--set", "--tokens")
    add("--steps", type=types.positive, default=3, help="profiled steps")
    add("--timed", type=types.positive, default=10, help="steps timed without the profiler")
    add("--warmup", type=types.not_negative, default=6, help="steps before, which also compile and capture")
    add("--blocks", type=types.counts, default=(), help="cut the model: its blocks of each kind, 2,4")
    add("--top", type=types.positive, default=40, help="kernels in the list")
    add("--operators", action="store_true", help="record the CPU's operators too (slower)")
    add("--trace", type=types.new_file, help="keep the trace here (.json or .json.gz)")
    add("--json", type=types.new_file, help="write the figures here")
    options = parser.parse_args(arguments)
    given = {name: vars(options)[name] for name in ("steps", "timed", "warmup", "top", "operators")}
    given |= {"tokens": options.tokens, "trace": options.trace and options.trace.resolve()}
    blocks = options.blocks
    ended = jobs.call_run(profile, options.configs, options.overrides, given, probe=True, blocks=blocks)
    if ended.answer:
        print(json.dumps(ended.answer["figures"]))
        types.write_rows(options.json, ended.answer)
    return ended.code


def profile(
    spec: str,
    *,
    tokens: int,
    steps: int,
    timed: int = 10,
    warmup: int = 6,
    top: int = 40,
    operators: bool = False,
    trace: str | None = None,
) -> dict[str, Any]:
    """Build, time and profile in the child; prints the table, gives the figures and all that it says."""
    import torch

    from bench.steps import make_step, record_trace
    from bench.steps import timed as timed_steps
    from trainer.engine.building.build import build

    context = jobs.make_context(spec)
    started = time.perf_counter()
    built = build(context)
    step = make_step(context, built, tokens)
    loaded = time.perf_counter()
    timed_steps(step, warmup)
    warm = time.perf_counter()
    times = timed_steps(step, timed)
    # peaks since the process started, and how often a step waited for blocks to go back to the driver
    memory: dict[str, float] = {}
    if context.device != "cpu":
        memory = {
            "allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
            "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
            "allocator_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        }
    path = Path(trace or Path(spec).parent / "trace.json")
    record_trace(step, steps, path, operators=operators or context.device == "cpu")
    summary = summarize(read_trace(path), steps)
    print(summary_text(summary, top=top))
    figures = {
        "milliseconds": round(statistics.median(times), 2),
        "fastest": round(min(times), 2),
        "slowest": round(max(times), 2),
        "load_seconds": round(loaded - started, 1),
        "warmup_seconds": round(warm - loaded, 1),
        **memory,
        "busy_fraction": round(summary.busy_fraction, 4),
        "copy_share": round(summary.copy_share, 4),
    }
    return {"figures": figures, "summary": dataclasses.asdict(summary)}
