"""Where the milliseconds of a training step go: the real model and optimizer on a synthetic batch, profiled.

    python -m bench profile train_configs/flux1_dev_lora.yaml --set model.weights=random \\
        --set model.pretrained_model_name_or_path=BASE --set features.compute=fp8 --steps 3

The plan and the model are made as `trainer train` makes them, in a process with the plan's environment;
no data set is read. `--blocks 2,4` cuts the model to its first blocks for quick experiments (then the
weights are random). Steps are timed without the profiler first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import arguments as types
from bench.trace import read_trace, summarize, summary_text
from trainer import families
from trainer.cli.options import load_config
from trainer.config import environment
from trainer.config.reading.load import Loaded, dump, load
from trainer.engine.spec import Spec, read_spec, write_spec
from trainer.errors import AccessError, ConfigError
from trainer.planning.plan import Plan
from trainer.planning.render import plan_from_json, plan_to_json

if TYPE_CHECKING:
    import torch

    from trainer.engine.building.build import Built
    from trainer.engine.context import Context
    from trainer.families.values import Shape

BLOCK_KEYS = ("num_layers", "num_single_layers", "num_visual_blocks", "num_text_blocks", "num_hidden_layers")
"""Keys of a model's config.json that count its repeated blocks, in the order of `--blocks`."""
_GIB = 1024**3


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan here, profile in a child that has the plan's environment; the exit code is the child's."""
    options = _parser().parse_args(arguments)
    if options.spec is not None:
        profile(options)
        return 0
    from trainer.cli.measure import planned

    with tempfile.TemporaryDirectory(prefix="profile-") as name:
        folder = Path(name)
        overrides = [*options.overrides]
        loaded = load_config(options.configs, overrides, None, folder / "run")
        if options.blocks:
            base = cut_base(loaded.config.family, Path(_base(loaded)), folder / "base", options.blocks)
            overrides += [f"model.pretrained_model_name_or_path={base}", "model.weights=random"]
            loaded = load_config(options.configs, overrides, None, folder / "run")
        _, plan = planned(loaded, probe=True)
        spec = write_job(loaded, plan, folder)
        command = [sys.executable, "-m", "bench.profile_step", *(arguments or sys.argv[1:])]
        command += ["--spec", str(spec)]
        child = plan.child_environment(environment.snapshot())
        return subprocess.run(command, env=child, check=False).returncode


def write_job(loaded: Loaded, plan: Plan, folder: Path) -> Path:
    """Write a training job whose files all lie in `folder`; gives the path of its spec."""
    (folder / "config.yaml").write_text(dump(loaded.config))
    (folder / "runtime").mkdir(exist_ok=True)
    spec = Spec(
        mode="train",
        config_file=str(folder / "config.yaml"),
        plan_text=plan_to_json(plan),
        runtime_dir=str(folder / "runtime"),
        cache_dir=str(folder / "cache"),
    )
    write_spec(spec, folder / "spec.json")
    return folder / "spec.json"


def _parser() -> argparse.ArgumentParser:
    parser = types.command_parser("profile", __doc__)
    parser.add_argument("configs", nargs="+", type=lambda text: Path(text).resolve(), metavar="CONFIG")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=types.positive, default=3, help="profiled steps")
    parser.add_argument("--timed", type=types.positive, default=10, help="steps timed without the profiler")
    parser.add_argument(
        "--warmup", type=types.not_negative, default=6, help="steps before, which also compile and capture"
    )
    parser.add_argument("--tokens", type=types.positive, default=512, help="text tokens")
    parser.add_argument(
        "--blocks", type=types.counts, default=(), help="cut the model: its blocks of each kind, 2,4"
    )
    parser.add_argument("--top", type=types.positive, default=40, help="kernels in the list")
    parser.add_argument("--operators", action="store_true", help="record the CPU's operators too (slower)")
    parser.add_argument("--trace", type=types.new_file, help="keep the trace here (.json or .json.gz)")
    parser.add_argument("--json", type=types.new_file, help="write the figures here")
    parser.add_argument("--spec", type=Path, help=argparse.SUPPRESS)
    return parser


def _base(loaded: Any) -> str:
    return str(loaded.config.model.pretrained_model_name_or_path)


def cut_base(family_name: str, base: Path, folder: Path, counts: Sequence[int]) -> Path:
    """A copy of a base model's configs whose trained component has `counts` blocks of each kind.

    Raises as `block_keys`.
    """
    keys = block_keys(family_name, base, counts)
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    path = folder / families.get(family_name).trained_component / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(zip(keys, counts, strict=False))))
    return folder


def block_keys(family_name: str, base: Path, counts: Sequence[int]) -> list[str]:
    """The keys by which a base's trained component counts its blocks, one for each of `counts` at least.

    Raises AccessError where there is no such base, ConfigError for more counts than keys.
    """
    keys = count_keys(family_name, base)
    if len(counts) > len(keys):
        raise ConfigError(
            f"{len(counts)} counts, but {family_name} counts {', '.join(keys) or 'no blocks'}",
            where="--blocks",
            remedy="give as many numbers as there are kinds of blocks, or fewer",
        )
    return keys


def count_keys(family_name: str, base: Path) -> list[str]:
    """All keys by which a base's trained component counts its blocks. Raises AccessError without a base."""
    return list(_block_counts(family_name, base))


def count_blocks(family_name: str, base: Path) -> int:
    """All repeated blocks of a base's trained component. Raises AccessError without a base."""
    return sum(_block_counts(family_name, base).values())


def _block_counts(family_name: str, base: Path) -> dict[str, int]:
    """Repeated blocks by the key that counts them."""
    path = types.require_base(base, "--blocks") / families.get(family_name).trained_component / "config.json"
    if not path.is_file():
        raise AccessError(
            "there is no such file", where=str(path), remedy=f"is this a base of {family_name}?"
        )
    config = json.loads(path.read_text())
    return {key: int(config[key]) for key in BLOCK_KEYS if key in config}


def profile(options: argparse.Namespace) -> None:
    """In the child: build, time, profile, print."""
    import torch

    spec = read_spec(options.spec)
    context = make_context(spec)
    from trainer.engine.building.build import build

    started = time.perf_counter()
    built = build(context)
    step = make_step(context, built, options.tokens)
    load_seconds = time.perf_counter() - started
    synchronize = torch.cuda.synchronize if context.device != "cpu" else _nothing
    started = time.perf_counter()
    for _ in range(options.warmup):
        step()
    synchronize()
    warmup_seconds = time.perf_counter() - started
    times = [timed_step(step, synchronize) for _ in range(options.timed)]
    memory = _memory(context.device)
    trace = options.trace or Path(spec.runtime_dir) / "trace.json"
    record_trace(step, options.steps, trace, operators=options.operators or context.device == "cpu")
    summary = summarize(read_trace(trace), options.steps)
    figures = {
        "milliseconds": round(statistics.median(times), 2),
        "fastest": round(min(times), 2),
        "slowest": round(max(times), 2),
        "load_seconds": round(load_seconds, 1),
        "warmup_seconds": round(warmup_seconds, 1),
        **memory,
        "busy_fraction": round(summary.busy_fraction, 4),
        "copy_share": round(summary.copy_share, 4),
    }
    print(summary_text(summary, top=options.top))
    print(json.dumps(figures))
    if options.json:
        content = {"figures": figures, "summary": dataclasses.asdict(summary)}
        options.json.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def make_context(spec: Spec) -> Context:
    """The context of a run as `trainer.engine` makes it, without supervisor and data set."""
    from trainer.engine.context import Context, apply_backend_settings
    from trainer.modeling.base.source import resolve_source
    from trainer.modeling.quiet import quiet_libraries
    from trainer.telemetry.status import StatusWriter
    from trainer.telemetry.stop import StopFlag

    known: dict[str, dict[str, Any]] = {name: {} for name in families.names()}
    config = load([Path(spec.config_file)], family_defaults=known, environ={}).config
    quiet_libraries()
    family = families.get(config.family)
    Path(spec.runtime_dir).mkdir(parents=True, exist_ok=True)
    context = Context(
        config=config,
        plan=plan_from_json(spec.plan_text),
        family=family,
        source=resolve_source(config, families.components(family), trained=family.trained_component),
        cache_dir=Path(spec.cache_dir),
        status=StatusWriter(Path(spec.runtime_dir)),
        stop=StopFlag(),
        say=lambda line: print(line, file=sys.stderr),
    )
    apply_backend_settings(context)
    return context


def make_step(context: Context, built: Built, tokens: int) -> Callable[[], None]:
    """A function that does what the training loop does in one step of one micro-batch.

    `tokens` are the text tokens of an image family; a language model's row has data.max_sequence_length.
    """
    import torch

    from trainer.engine.building.fast import uncompiled
    from trainer.engine.caching.batches import to_device
    from trainer.engine.optimizing.optimizer import HostFlag
    from trainer.engine.training.graphs import Graphs

    family, config = context.family, context.config
    settings, batch, draws = _synthetic(context, tokens)
    state: dict[str, Any] = {"step": 0, "flag": None}
    if context.plan.pin_memory:
        batch = dataclasses.replace(batch, latents=_pinned(batch.latents), text=_pinned(batch.text))
        draws = [None if draw is None else type(draw)(**_pinned(vars(draw))) for draw in draws]

    def micro_batch(moved: Any, draw: Any, weight: Any) -> torch.Tensor:
        loss = family.loss(built.model, moved, draw, settings).sum() / weight
        built.accelerator.backward(loss)
        built.updater.accumulate()
        return loss.detach()

    def predict(moved: Any, draw: Any) -> None:
        with torch.no_grad(), uncompiled(context):
            family.predict(built.model, moved, draw, settings)

    graphs = Graphs(micro_batch, predict, context.say) if context.plan.cuda_graphs else None

    def step() -> None:
        loss_sum = torch.zeros((), device=context.device, dtype=torch.float64)
        draw = draws[state["step"] % len(draws)]
        moved, draw = to_device(batch, draw, context.device, context.dtype)
        if graphs is None:
            loss_sum += micro_batch(moved, draw, batch.weight)
        else:
            loss_sum += graphs(moved, draw, torch.full((), batch.weight, device=context.device))
        if state["flag"] is not None and state["flag"].read() != 0.0:
            raise RuntimeError(f"step {state['step']}: the loss or a gradient is not finite")
        _, bad = built.updater.step(config.train.learning_rate, loss_sum)
        state["flag"] = HostFlag(bad)
        state["step"] += 1

    return step


def make_forward(context: Context, built: Built, tokens: int) -> Callable[[], torch.Tensor]:
    """A function that gives a micro-batch's loss, a scalar, with its graph; the batch is on the device."""
    from trainer.engine.caching.batches import to_device

    settings, batch, draws = _synthetic(context, tokens)
    moved, draw = to_device(batch, draws[0], context.device, context.dtype)
    return lambda: context.family.loss(built.model, moved, draw, settings).sum() / batch.weight


def synthetic_shape(context: Context, tokens: int) -> Shape:
    """One micro-batch of the run's size."""
    from trainer.families.values import Shape

    family, config = context.family, context.config
    return Shape(
        batch_size=context.plan.micro_batch_size,
        width=config.data.resolution,
        height=config.data.resolution,
        text_tokens=tokens if family.sample_kind == "image" else config.data.max_sequence_length,
        bytes_per_value=2,
        controls=family.control_counts[0],
    )


def _synthetic(context: Context, tokens: int) -> tuple[Any, Any, list[Any]]:
    """(the family's settings, a micro-batch, some draws for it) of the run's size, on the host."""
    family, shape = context.family, synthetic_shape(context, tokens)
    settings = family.settings(context.source, context.config)
    batch = family.synthetic_batch(context.source.component_config(family.trained_component), shape, 0)
    header = {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}
    draws = [
        family.draw(settings, list(range(first, first + batch.size)), header)
        for first in range(0, 4 * batch.size, batch.size)
    ]
    return settings, batch, draws


def _pinned(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.pin_memory() for name, tensor in tensors.items()}


def record_trace(step: Callable[[], None], steps: int, path: Path, *, operators: bool) -> None:
    """Profile `steps` steps, queued as a run queues them, and export the trace."""
    import torch
    from torch.profiler import ProfilerActivity

    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if cuda else []
    if operators or not cuda:
        activities.append(ProfilerActivity.CPU)
    with torch.profiler.profile(activities=activities):
        step()  # the profiler's own start-up is no gap of ours
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        if cuda:
            torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def timed_step(step: Callable[[], None], synchronize: Callable[[], None]) -> float:
    """Milliseconds of one step."""
    started = time.perf_counter()
    step()
    synchronize()
    return 1e3 * (time.perf_counter() - started)


def _nothing() -> None:
    """A CPU's step is done when it returns."""


def _memory(device: str) -> dict[str, float]:
    """Peaks of device memory in GiB since the process started, and how often the allocator had to give blocks
    back to the driver before it could hand one out, which a step waits for; none on a CPU.
    """
    import torch

    if device == "cpu":
        return {}
    return {
        "allocated_gib": round(torch.cuda.max_memory_allocated(device) / _GIB, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved(device) / _GIB, 2),
        "allocator_retries": torch.cuda.memory_stats(device)["num_alloc_retries"],
    }


if __name__ == "__main__":
    sys.exit(main())
