"""What a step costs beside its mathematics: data loading, noise, heartbeat, log and metrics.

    python -m bench overhead
    python -m bench overhead --step-ms 240 --set data.resolution=1024

The training process runs as it is, from files to its log, but forward, backward and the optimizer's step are
a sleep, which like waiting for a GPU leaves the processor to others. All that a step takes beyond it is
what the run's bookkeeping costs the thread that feeds the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import arguments as types
from bench import profile_step
from trainer.cli.options import load_config
from trainer.config import environment
from trainer.planning.planning import machine_facts, plan_run, requested_profile

_WARM_UP = 12


class _MeasuredError(Exception):
    """Ends the run when all steps were measured."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan here, measure in a child that has the plan's environment; print one line of JSON."""
    options = _parser().parse_args(arguments)
    if options.spec is not None:
        measure(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        overrides = [
            f"train.max_train_steps={options.steps + _WARM_UP}",
            "train.lr_warmup_steps=0",
            "validation.prompts=[]",
            "validation.img_dir=null",
            *options.overrides,
        ]
        loaded = load_config((options.config,), overrides, None, folder / "run")
        plan = plan_run(loaded, machine_facts(), requested_profile())
        spec = profile_step.write_job(loaded, plan, folder)
        command = [sys.executable, "-m", "bench.overhead", "--spec", str(spec)]
        command += ["--steps", str(options.steps), "--step-ms", str(options.step_ms)]
        child = plan.child_environment(environment.snapshot())
        return subprocess.run(command, env=child, check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = types.command_parser("overhead", __doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("train_configs/quickstart.yaml"))
    parser.add_argument("--steps", type=types.positive, default=40)
    parser.add_argument(
        "--step-ms", type=types.amount, default=240.0, help="milliseconds that a step pretends to take"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--spec", type=Path, help=argparse.SUPPRESS)
    return parser


def measure(options: argparse.Namespace) -> None:
    """In the child: the real run with a sleep in the place of its mathematics."""
    import torch

    from trainer.engine import __main__ as engine
    from trainer.engine.optimizing.optimizer import Updater
    from trainer.engine.training import loop, microbatch

    seconds = options.step_ms / 1000
    times: list[float] = []
    slept: list[float] = []
    one_step, after_step = loop._one_step, loop._after_step

    def compute(context: Any, built: Any, settings: Any, batch: Any, draw: Any, weight: Any) -> torch.Tensor:
        started = time.perf_counter()
        plan = context.plan
        # of the step's time as much as it has of the step's samples
        time.sleep(seconds * batch.size / (plan.micro_batch_size * plan.accumulation_steps))
        slept.append(time.perf_counter() - started)
        return torch.zeros((), device=context.device)

    def step(self: Updater, rate: float, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones((), device=loss.device), torch.zeros((), device=loss.device)

    def timed(work: Callable[..., None], *, last: bool) -> Callable[..., None]:
        def run(*given: Any) -> None:
            started = time.perf_counter()
            work(*given)
            spent = time.perf_counter() - started
            if not last:
                times.append(spent - sum(slept))
                slept.clear()
                return
            times[-1] += spent
            if len(times) == options.steps + _WARM_UP:
                raise _MeasuredError

        return run

    microbatch.compute = compute
    Updater.step = step  # type: ignore[method-assign]
    loop._one_step, loop._after_step = timed(one_step, last=False), timed(after_step, last=True)
    with contextlib.suppress(_MeasuredError):
        engine.main(str(options.spec))
    found = sorted(1000 * value for value in times[_WARM_UP:])
    if not found:
        sys.exit("the run ended before its first step; its log says why")
    figures = {
        "step_ms": options.step_ms,
        "median_ms": statistics.median(found),
        "mean_ms": statistics.fmean(found),
        "most_ms": found[-1],
        "share": statistics.fmean(found) / options.step_ms,
    }
    print(json.dumps({name: round(value, 5) for name, value in figures.items()}))


if __name__ == "__main__":
    sys.exit(main())
