"""Floor 6: a micro-batch's forward and backward as one CUDA graph, so that the host's speed does not matter.

A step of a large model is some five thousand kernels. Launching them one by one takes the host as long as the
device needs to run them; replaying a graph takes it a millisecond. A graph is captured for each set of tensor
shapes, after some micro-batches of these shapes ran as usual: these compile, and choose algorithms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainer.families.protocol import Batch, Draw

Compute = Callable[[Batch, Draw | None, torch.Tensor], torch.Tensor]
"""Loss of a micro-batch (a scalar, detached) from batch, draw and weight (fp32 scalar); its gradients are
added to the optimizer's sums.
"""
# micro-batches of one kind that run as usual first; the second one no longer compiles
WARM_UP = 3
# kinds that are captured; later ones run as usual
MOST_GRAPHS = 12


@dataclass(kw_only=True)
class _Captured:
    """One graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    loss: torch.Tensor


class Graphs:
    """Runs `compute`, from graphs where it can. All graphs share one pool: they never run side by side."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.captured: dict[Any, _Captured] = {}
        self._seen: dict[Any, int] = {}
        self._pool: Any = None

    def __call__(self, batch: Batch, draw: Draw | None, weight: torch.Tensor) -> torch.Tensor:
        """The micro-batch's loss: a scalar that the next call of the same kind may overwrite."""
        key = _kind(batch, draw)
        captured = self.captured.get(key)
        if captured is None:
            seen = self._seen[key] = self._seen.get(key, 0) + 1
            if seen <= WARM_UP or len(self.captured) >= MOST_GRAPHS:
                return self.compute(batch, draw, weight)
            captured = self.captured[key] = self._capture(batch, draw, weight)
        torch._foreach_copy_(captured.inputs, _tensors(batch, draw, weight))
        captured.graph.replay()
        return captured.loss

    def drop(self) -> None:
        """Free what the graphs hold, all activations of a step; they are captured again when needed."""
        self.captured.clear()
        self._pool = None
        torch.cuda.empty_cache()

    def _capture(self, batch: Batch, draw: Draw | None, weight: torch.Tensor) -> _Captured:
        """Record `compute` without running it."""
        copies = [tensor.clone() for tensor in _tensors(batch, draw, weight)]
        held = iter(copies)
        latents = {name: next(held) for name in batch.latents}
        text = {name: next(held) for name in batch.text}
        own = dataclasses.replace(batch, latents=latents, text=text)
        own_draw = None if draw is None else Draw(**{name: next(held) for name in vars(draw)})
        graph = torch.cuda.CUDAGraph()
        # other threads pin memory meanwhile, which is no part of the graph
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self.compute(own, own_draw, next(held))
        self._pool = graph.pool()
        return _Captured(graph=graph, inputs=copies, loss=loss)


def _tensors(batch: Batch, draw: Draw | None, weight: torch.Tensor) -> list[torch.Tensor]:
    drawn = [] if draw is None else list(vars(draw).values())
    return [*batch.latents.values(), *batch.text.values(), *drawn, weight]


def _kind(batch: Batch, draw: Draw | None) -> Any:
    names = (tuple(batch.latents), tuple(batch.text), batch.size)
    drawn = [] if draw is None else list(vars(draw).values())
    tensors = [*batch.latents.values(), *batch.text.values(), *drawn]
    return names, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
