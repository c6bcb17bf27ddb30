"""Steps on a synthetic batch: what the training loop does in one of them, without its data set."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.config.schema import RunConfig
from trainer.engine.building.build import Built
from trainer.engine.caching.batches import to_device
from trainer.engine.context import Context
from trainer.engine.optimizing.updater import HostFlag
from trainer.engine.training import loop
from trainer.engine.training.graphs import Graphs
from trainer.families.family import Family
from trainer.families.values import Batch, Draw, Shape
from trainer.modeling.base.source import ModelSource

_DRAWS = 4


def shape_of(context: Context, tokens: int) -> Shape:
    """One micro-batch of the run's size; `tokens` are the text tokens of an image family."""
    family, config = context.family, context.config
    return Shape(
        batch_size=context.plan.micro_batch_size,
        width=config.data.resolution,
        height=config.data.resolution,
        text_tokens=tokens if family.sample_kind == "image" else config.data.max_sequence_length,
        bytes_per_value=2,
        controls=family.control_counts[0],
    )


def synthetic(
    family: Family, source: ModelSource, config: RunConfig, shape: Shape
) -> tuple[Any, Batch, list[Draw | None]]:
    """(the family's settings, a micro-batch, some draws for it), on the host."""
    settings = family.settings(source, config)
    batch = family.synthetic_batch(source.component_config(family.trained_component), shape, 0)
    header = {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}
    firsts = range(0, _DRAWS * batch.size, batch.size)
    draws = [family.draw(settings, list(range(first, first + batch.size)), header) for first in firsts]
    return settings, batch, draws


def make_step(context: Context, built: Built, tokens: int, micro_batches: int = 1) -> Callable[[], None]:
    """A function that does what the training loop does in one step of so many micro-batches.

    `tokens` are the text tokens of an image family; a language model's row has data.max_sequence_length.
    """
    shape = shape_of(context, tokens)
    _, batch, draws = synthetic(context.family, context.source, context.config, shape)
    if context.plan.pin_memory:
        batch = dataclasses.replace(batch, latents=_pinned(batch.latents), text=_pinned(batch.text))
        draws = [None if draw is None else type(draw)(**_pinned(vars(draw))) for draw in draws]
    compute = functools.partial(loop.compute, context, built)
    predict = functools.partial(loop.predict, context, built)
    between = None if built.staged is None else built.staged.empty
    graphs = Graphs(compute, predict, context.say, between=between) if context.plan.cuda_graphs else None
    number = 0
    flag: HostFlag | None = None

    def step() -> None:
        nonlocal number, flag
        loss = torch.zeros((), device=context.device, dtype=torch.float64)
        for _ in range(micro_batches):
            moved, draw = to_device(batch, draws[number % len(draws)], context.device, context.dtype)
            weight = micro_batches * batch.weight
            if graphs is None:
                loss += compute(moved, draw, weight)
            else:
                loss += graphs(moved, draw, torch.full((), weight, device=context.device))
        if flag is not None and flag.read() != 0.0:
            raise RuntimeError(f"step {number}: the loss or a gradient is not finite")
        _, bad = built.updater.step(context.config.train.learning_rate, loss)
        flag, number = HostFlag(bad), number + 1

    return step


def make_forward(context: Context, built: Built, tokens: int) -> Callable[[], torch.Tensor]:
    """A function that gives a micro-batch's loss, a scalar, with its graph; the batch is on the device."""
    shape = shape_of(context, tokens)
    settings, batch, draws = synthetic(context.family, context.source, context.config, shape)
    moved, draw = to_device(batch, draws[0], context.device, context.dtype)
    return lambda: context.family.loss(built.model, moved, draw, settings).sum() / batch.weight


def timed(step: Callable[[], None], steps: int) -> list[float]:
    """Milliseconds of each of so many steps, to the end of the device's work."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return times


def record_trace(step: Callable[[], None], steps: int, path: Path, *, operators: bool) -> None:
    """Profile `steps` steps, queued as a run queues them, and export the trace."""
    cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CUDA] if cuda else []
    if operators or not cuda:
        activities.append(torch.profiler.ProfilerActivity.CPU)
    with torch.profiler.profile(activities=activities):
        step()  # the profiler's own start-up is no gap of ours
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        if cuda:
            torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def _pinned(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.pin_memory() for name, tensor in tensors.items()}
