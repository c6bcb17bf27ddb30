"""Measure what a step costs beside its mathematics: data loading, noise, heartbeat, log and metrics.

    python -m bench overhead
    python -m bench overhead --step-ms 240 --set data.resolution=1024

The training process runs as it is, from files to its log, but forward, backward and the optimizer's step are
a sleep, which like waiting for a GPU leaves the processor to others. All that a step takes beyond it is
what the run's bookkeeping costs the thread that feeds the GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import arguments as types
from bench import jobs

_WARM_UP = 12


class _MeasuredError(Exception):
    """Ends the run when all steps were measured."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan here, measure in a child that has the plan's environment; print one line of JSON."""
    parser = types.command_parser("overhead", __doc__)
    add = parser.add_argument
    add("config", type=Path, nargs="?", default=Path("train_configs/quickstart.yaml"))
    add("--steps", type=types.positive, default=40)
    add("--step-ms", type=types.amount, default=240.0, help="milliseconds that a step pretends to take")
    types.add_common(parser, "--set")
    options = parser.parse_args(arguments)
    steps = f"train.max_train_steps={options.steps + _WARM_UP + 1}"
    nothing_else = ("train.lr_warmup_steps=0", "validation.prompts=[]", "validation.img_dir=null")
    overrides = (steps, *nothing_else, *options.overrides)
    given = {"steps": options.steps, "step_ms": options.step_ms}
    ended = jobs.call_run(measure, [options.config], overrides, given, probe=False)
    if ended.answer:
        print(json.dumps(ended.answer))
    return ended.code


def measure(spec: str, steps: int, step_ms: float) -> dict[str, float]:
    """Run the real training in the child with a sleep in the place of its mathematics; gives milliseconds."""
    import torch

    from trainer.engine import __main__ as engine
    from trainer.engine.optimizing.updater import Updater
    from trainer.engine.training import loop

    ends: list[float] = []
    slept: list[float] = [0.0]

    def compute(context: Any, built: Any, batch: Any, draw: Any, weight: Any) -> torch.Tensor:
        started = time.perf_counter()
        plan = context.plan
        # of the step's time as much as it has of the step's samples
        time.sleep(step_ms / 1000 * batch.size / (plan.micro_batch_size * plan.accumulation_steps))
        slept[-1] += time.perf_counter() - started
        return torch.zeros((), device=context.device)

    def step(self: Updater, rate: float, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ends.append(time.perf_counter())
        slept.append(0.0)
        if len(ends) > steps + _WARM_UP:
            raise _MeasuredError
        return torch.ones((), device=loss.device), torch.zeros((), device=loss.device)

    loop.compute = compute
    Updater.step = step  # type: ignore[method-assign]
    with contextlib.suppress(_MeasuredError):
        engine.main(spec)
    # from one step's end to the next one's
    whole = [after - before for before, after in itertools.pairwise(ends)]
    found = [1000 * (one - asleep) for one, asleep in zip(whole, slept[1:], strict=False)][_WARM_UP:]
    if not found:
        sys.exit("the run ended before its first step; its log says why")
    figures = {
        "step_ms": step_ms,
        "median_ms": statistics.median(found),
        "mean_ms": statistics.fmean(found),
        "most_ms": max(found),
        "share": statistics.fmean(found) / step_ms,
    }
    return {name: round(value, 5) for name, value in figures.items()}
