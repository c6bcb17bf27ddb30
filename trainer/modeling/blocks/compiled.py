"""Repeated blocks through torch.compile, one graph for all blocks of a class."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from trainer.modeling.blocks.recompute import Blocks, RecomputedInside, recomputed

# how often one kind of block is compiled for new shapes; after a few its sizes are dynamic anyway
MOST_COMPILED = 16

Varying = Mapping[str, Sequence[tuple[int, ...]]]
"""The dimensions that differ from one micro-batch to another, of each tensor among a block's inputs in their
order, by the name of the block's class.
"""


def varying_sizes(blocks: Blocks, runs: Sequence[Callable[[], None]]) -> dict[str, list[tuple[int, ...]]]:
    """`Varying` of the blocks, from forward passes of several sizes.

    To be called before they are compiled. Each of `runs` passes through the model once, the first one's sizes
    being compared with the others'.
    """
    seen: dict[str, list[list[torch.Size]]] = {}

    def note(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.setdefault(type(block).__name__, []).append([one.shape for one in _tensors(args, kwargs)])

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks.values()]
    passes = []
    try:
        for run in runs:
            run()
            passes.append(seen)
            seen = {}
    finally:
        for hook in hooks:
            hook.remove()
    first, *others = passes
    return {
        name: [
            tuple(d for d in range(len(shape)) if any(other[name][0][at][d] != shape[d] for other in others))
            for at, shape in enumerate(calls[0])
        ]
        for name, calls in first.items()
    }


def mark_varying(tensor: torch.Tensor, dimensions: Sequence[int]) -> None:
    """Compile these dimensions of a compiled block's input for every size, from the first graph on."""
    import torch._dynamo

    torch._dynamo.maybe_mark_dynamic(tensor, list(dimensions))


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors among a block's inputs, also inside tuples, lists and mappings."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value, {})
        elif isinstance(value, Mapping):
            yield from _tensors((), value)


def compile_blocks(
    blocks: Blocks,
    *,
    activation_budget: float,
    varying: Varying = MappingProxyType({}),
    in_rows: bool = False,
    say: Callable[[str], None] = warnings.warn,
) -> int:
    """Compile every block at its first call, and return their number.

    With an `activation_budget` below 1 the cheapest operations are recomputed in backward, so that this share
    of the activations beyond a block's input stays; blocks of `RecomputedInside` keep none. Graphs are of any
    size in the dimensions `varying`; in others they are of one size until a second one comes. `say` is told
    once for each kind of which more shapes come than it is compiled for: these run uncompiled. Blocks whose
    weights are gathered for each use (`in_rows`) are compiled without the hooks that do it.
    """
    import torch._dynamo
    from torch.distributed.fsdp import FSDPModule

    _set_compiler(varying)
    inside = [isinstance(block, RecomputedInside) for block in blocks.values()]
    # torch counts by the code that is run, which blocks of both classes of a kind have in common
    most = MOST_COMPILED * len(set(inside) or {False})
    torch._dynamo.config.recompile_limit = most
    limits: dict[str, _Limit] = {}
    block: Any
    for block, is_inside in zip(blocks.values(), inside, strict=True):
        limit = limits.setdefault(type(block).__name__, _Limit(most, say))
        if in_rows:
            # a part of a block that is gathered for itself ends a graph
            whole = not any(isinstance(one, FSDPModule) for one in block.modules() if one is not block)
            compiled = torch.compile(block.forward, fullgraph=whole)
        else:
            block.compile(fullgraph=True)
            compiled = block._compiled_call_impl
        limited = _within_limit(
            compiled,
            limit,
            0.0 if is_inside else activation_budget,
            varying.get(type(block).__name__, ()),
            keeps_all=activation_budget == 1.0 and not any(inside),
        )
        if in_rows:
            block.forward = limited
        else:
            block._compiled_call_impl = limited
    return len(blocks)


def _set_compiler(varying: Varying) -> None:
    """Settings of the compiler, for the whole process, by what varies."""
    import torch._inductor.config

    most = max((len(dimensions) for kind in varying.values() for dimensions in kind), default=0)
    if most > 0:
        # a product whose rank is no multiple of 8 (bf16) is padded where a timing of the moment says so, and
        # then each number of pictures in a batch has a graph: 8 or 9 on an H200 with rank 4, 6 without it
        torch._inductor.config.shape_padding = False
    if most > 1:
        # torch 2.11 asserts what does not hold of products of two sizes that vary (its issue 181563)
        torch._inductor.config.triton.coalesce_tiling_analysis = False


class _Limit:
    """Whether blocks of one kind have been compiled as often as they may be."""

    def __init__(self, most: int, say: Callable[[str], None]) -> None:
        self.reached, self._most, self._say = False, most, say

    def reach(self) -> None:
        """Note that the limit is reached, and say so."""
        self.reached = True
        self._say(
            f"blocks were compiled {self._most} times, as pictures and captions of more sizes came:"
            " further ones run uncompiled, slower"
        )


def _within_limit(
    compiled: Callable[..., Any],
    limit: _Limit,
    budget: float,
    varying: Sequence[tuple[int, ...]],
    *,
    keeps_all: bool,
) -> Callable[..., Any]:
    """`compiled`, with a budget for activations, which beyond the limit runs new shapes as they are written.

    Inputs' dimensions `varying` are marked, which counts where a graph is made.

    Where not all compiled blocks keep all activations, blocks are recomputed whole from there on: uncompiled
    ones would keep more than the plan has room for.
    """
    import torch._functorch.config as settings
    from torch._dynamo.exc import FailOnRecompileLimitHit

    def beyond(*args: Any, **kwargs: Any) -> Any:
        stance: Any = torch.compiler.set_stance("eager_on_recompile")
        with stance:
            return compiled(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if _written_only:
            return compiled(*args, **kwargs)
        if not limit.reached:
            tensors = tuple(_tensors(args, kwargs)) if varying else ()
            if len(tensors) == len(varying):  # else it is called in another way, and compiled as sizes come
                for tensor, dimensions in zip(tensors, varying, strict=True):
                    mark_varying(tensor, dimensions)
            # read when a graph is made: blocks of another class have graphs of their own, and another budget
            before, settings.activation_memory_budget = settings.activation_memory_budget, budget
            try:
                return compiled(*args, **kwargs)
            except FailOnRecompileLimitHit:
                limit.reach()
            finally:
                settings.activation_memory_budget = before
        if keeps_all or not torch.is_grad_enabled():
            return beyond(*args, **kwargs)
        return recomputed(beyond, args, kwargs, draws=False)

    return call


# not empty while `eager` is entered: its stance is not to be changed
_written_only: list[None] = []


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled blocks uncompiled, outside of training, where another graph does not pay."""
    stance: Any = torch.compiler.set_stance("force_eager")
    _written_only.append(None)
    try:
        with stance:
            yield
    finally:
        _written_only.pop()


def graphs_compiled() -> int:
    """Number of graphs that this process has compiled, for the count of recompilations."""
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
