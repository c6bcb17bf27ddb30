"""A micro-batch's forward and backward as one CUDA graph, so that the host's speed does not matter.

A step of a large model is some five thousand kernels. Launching them one by one takes the host as long as the
device needs to run them; replaying a graph takes it a millisecond. A graph is captured for each set of tensor
shapes, after some micro-batches of these shapes ran as usual: these compile, and choose algorithms.

All of this is in one memory pool on one stream: the activations of a step are held once, not by the allocator
for micro-batches that run as usual and again by the graphs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trainer.families.losses import LOSS_MASK, LOSS_WEIGHT
from trainer.families.values import Batch, Draw
from trainer.words.plurals import numbered

Compute = Callable[[Batch, Draw | None, float | torch.Tensor], torch.Tensor]
"""Loss of a micro-batch (a scalar, detached) from batch, draw and weight (fp32 scalar); its gradients are
added to the optimizer's sums.
"""
Predict = Callable[[Batch, Draw | None], object]
"""Runs the model forward as it is written, without gradients: that makes the tables that it keeps by size."""
# micro-batches of one kind that run as usual first; the second one no longer compiles
WARM_UP = 2
# kinds that are captured: the frequent ones come often enough first, the others run as usual
MOST_CAPTURED = 24
# sizes of pictures after which no graph is used any more: diffusers keeps rotary tables of so many, then
# drops the oldest, which a graph may still read
MOST_SIZES = 128
# the same of the sets of sizes that are in one micro-batch, of each of which a family keeps one or two
MOST_SETS = 400

OF_ONE_PICTURE = ("std", LOSS_MASK, LOSS_WEIGHT)
"""Names of latents that are as large as the target's mean, or have one value per sample."""


@dataclass(kw_only=True)
class _Captured:
    """One graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    loss: torch.Tensor


class Sizes:
    """Sizes of pictures that have run. Tables are kept of so many; a graph does not say that it reads one."""

    def __init__(self) -> None:
        self._pictures: set[Any] = set()
        self._sets: set[Any] = set()

    def add(self, batch: Batch) -> None:
        """Count the sizes of a micro-batch: of each picture, and of all that are in it."""
        pictures = [(name, one.shape) for name, one in batch.latents.items() if name not in OF_ONE_PICTURE]
        self._pictures |= {(name, shape[-2:]) for name, shape in pictures}
        self._sets.add(tuple(sorted(pictures)))

    @property
    def many(self) -> bool:
        """True once a table may have gone that a graph reads."""
        return len(self._pictures) > MOST_SIZES or len(self._sets) > MOST_SETS


class _Pool:
    """A memory pool that is held until `release`.

    torch's own class ends the process where it is collected before a graph that uses its pool.
    """

    def __init__(self) -> None:
        self.id: Any = torch.cuda.graph_pool_handle()
        self._device = torch.cuda.current_device()
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, self.id)
        torch._C._cuda_endAllocateToPool(self._device, self.id)

    def release(self) -> None:
        """Let the allocator free the blocks that no graph uses."""
        torch._C._cuda_releasePool(self._device, self.id)


class Graphs:
    """Runs `compute`, from graphs where it can. They never run side by side.

    `between` frees what `predict`, a preview or a held-out loss left on the device for `compute` to find: a
    graph cannot wait for copies that began outside of it. `compute` itself leaves nothing there.
    """

    def __init__(
        self,
        compute: Compute,
        predict: Predict,
        say: Callable[[str], None],
        *,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.compute, self.predict, self._between = compute, predict, between
        self.captured: dict[Any, _Captured] = {}
        self._say = say
        self._seen: dict[Any, int] = {}
        self._sizes = Sizes()
        self._with_tables: set[Any] = set()
        """Kinds that ran since graphs were dropped: a preview may have pushed their tables out."""
        self._most_captured = 0
        self._pool = _Pool()
        self._stream = torch.cuda.Stream()

    def __call__(self, batch: Batch, draw: Draw | None, weight: torch.Tensor) -> torch.Tensor:
        """The micro-batch's loss: a scalar that the next call of the same kind may overwrite."""
        # equal for batches that one graph serves
        kinds = tuple((name, tuple(one.shape), one.dtype) for name, one in _named(batch, draw))
        key = batch.size, kinds
        captured = self.captured.get(key)
        if captured is None:
            seen = self._seen[key] = self._seen.get(key, 0) + 1
            if seen == 1:
                self._sizes.add(batch)
                return self._first(key, batch, draw, weight)
            if seen <= WARM_UP or len(self.captured) >= MOST_CAPTURED or self._sizes.many:
                if seen == WARM_UP + 1:
                    most = "of none" if self._sizes.many else f"of {MOST_CAPTURED} sets of shapes"
                    self._say(
                        f"{len(self._seen)} sets of shapes so far: CUDA graphs are kept {most}, this one runs"
                        " without"
                    )
                with self._aside():
                    return self.compute(batch, draw, weight)
            if key not in self._with_tables:
                self._make_tables(key, batch, draw)
            captured = self.captured[key] = self._capture(batch, draw, weight)
            self._most_captured = max(self._most_captured, len(self.captured))
        torch._foreach_copy_(captured.inputs, _tensors(batch, draw, weight))
        captured.graph.replay()
        return captured.loss

    def __str__(self) -> str:
        sets = numbered(len(self._seen), "set of shapes", "sets of shapes")
        return f"{numbered(self._most_captured, 'CUDA graph')} of {sets}"

    def _first(self, key: Any, batch: Batch, draw: Draw | None, weight: torch.Tensor) -> torch.Tensor:
        """The first micro-batch of a kind.

        A model may keep tables that it makes for a new size. In the pool they would lie where another graph
        puts what it computes: where there are graphs, tables are made first, outside the pool.
        """
        if self.captured and not self._sizes.many and self._make_tables(key, batch, draw):
            with self._aside():
                return self.compute(batch, draw, weight)
        self.drop()
        with self._on_stream():
            loss = self.compute(batch, draw, weight)
        self._with_tables.add(key)
        torch.cuda.empty_cache()
        return loss

    def _make_tables(self, key: Any, batch: Batch, draw: Draw | None) -> bool:
        """Make a new size's tables in a forward pass beside the graphs; False if memory had no room."""
        try:
            self.predict(batch, draw)
        except torch.OutOfMemoryError:
            self._say("a new size has no room beside the CUDA graphs: they are made anew")
            return False
        self._with_tables.add(key)
        torch.cuda.empty_cache()  # memory that the allocator keeps for others is not the pool's
        return True

    def drop(self) -> None:
        """Free the memory of all graphs, the activations of a step; they are captured again when needed."""
        # the last replay may still run: neither the graph nor the memory that it writes may go before its
        # end, and an expandable segment waits for its own stream alone before it is unmapped
        torch.cuda.synchronize()
        self.captured.clear()
        self._with_tables.clear()
        self._pool.release()
        torch.cuda.empty_cache()
        self._pool = _Pool()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """On the graphs' stream, between the work queued before and after.

        No backward runs on another: a parameter's node in autograd's graph is of the stream that made it, and
        lives as long as any graph with it, be it garbage. One of another stream would end a capture.
        """
        outside = torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """On the graphs' stream and in their pool."""
        # backward in a thread of its own would allocate elsewhere
        with (
            self._on_stream(),
            torch.cuda.use_mem_pool(self._pool),  # type: ignore[arg-type]  # of which it reads the id
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield

    def _capture(self, batch: Batch, draw: Draw | None, weight: torch.Tensor) -> _Captured:
        """Record `compute` without running it."""
        copies = [tensor.clone() for tensor in _tensors(batch, draw, weight)]
        held = iter(copies)
        latents = {name: next(held) for name in sorted(batch.latents)}
        text = {name: next(held) for name in sorted(batch.text)}
        own = dataclasses.replace(batch, latents=latents, text=text)
        own_draw = None if draw is None else Draw(**{name: next(held) for name in vars(draw)})
        if self._between is not None:
            self._between()
        graph = torch.cuda.CUDAGraph()
        # other threads pin memory meanwhile, which is no part of the graph
        with (
            torch.cuda.graph(
                graph, pool=self._pool.id, stream=self._stream, capture_error_mode="thread_local"
            ),
            torch.autograd.set_multithreading_enabled(False),
        ):
            loss = self.compute(own, own_draw, next(held))
        return _Captured(graph=graph, inputs=copies, loss=loss)


def _tensors(batch: Batch, draw: Draw | None, weight: torch.Tensor) -> list[torch.Tensor]:
    return [tensor for _, tensor in _named(batch, draw)] + [weight]


def _named(batch: Batch, draw: Draw | None) -> list[tuple[str, torch.Tensor]]:
    """By name: files list their tensors in any order."""
    drawn = [] if draw is None else list(vars(draw).items())
    return [*sorted(batch.latents.items()), *sorted(batch.text.items()), *drawn]
