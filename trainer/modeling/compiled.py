"""Floor 4: repeated blocks through torch.compile, one graph for all blocks of a kind."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# distinct shapes of one kind of block that are compiled; beyond a few they are dynamic anyway
MOST_COMPILED = 16


def compile_blocks(
    model: torch.nn.Module,
    kinds: Sequence[str],
    *,
    activation_budget: float,
    say: Callable[[str], None] = warnings.warn,
) -> int:
    """Compile every module whose class is named in `kinds`, at its first call; returns their number.

    `activation_budget` below 1 recomputes in backward what is cheapest, so that this share of the
    activations beyond a block's input stays. `say` is told once where more sets of shapes come than are
    compiled: these run as they are written.
    """
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = MOST_COMPILED
    torch._functorch.config.activation_memory_budget = activation_budget
    tell = _Once(say)
    count = 0
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.compile(fullgraph=True)
            compiled: Any = module
            compiled._compiled_call_impl = _within_limit(
                compiled._compiled_call_impl, compiled._call_impl, tell
            )
            count += 1
    return count


class _Once:
    """Says that shapes run uncompiled, at the first of them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, False

    def __call__(self) -> None:
        if not self._said:
            self._said = True
            self._say(
                f"blocks were compiled for {MOST_COMPILED} sets of shapes; further ones run uncompiled,"
                " slower: fewer sizes of pictures or lengths of captions avoid that"
            )


def _within_limit(
    compiled: Callable[..., Any], written: Callable[..., Any], tell: Callable[[], None]
) -> Callable[..., Any]:
    """`compiled`, and `written` for shapes beyond those that may be compiled: slower, but the run goes on."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except FailOnRecompileLimitHit:
            tell()
        return written(*args, **kwargs)

    return call


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled blocks as they are written: for what is not training, where a graph more does not pay."""
    stance: Any = torch.compiler.set_stance("force_eager")
    with stance:
        yield


def graphs_compiled() -> int:
    """Number of graphs that this process has compiled, for the count of recompilations."""
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
