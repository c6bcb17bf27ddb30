"""Floor 4: repeated blocks through torch.compile, one graph for all blocks of a kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# distinct shapes of one kind of block that are compiled before it fails; beyond a few they are dynamic anyway
MOST_COMPILED = 16


def compile_blocks(model: torch.nn.Module, kinds: Sequence[str], *, activation_budget: float) -> int:
    """Compile every module whose class is named in `kinds`, at its first call; returns their number.

    `activation_budget` below 1 recomputes in backward what is cheapest, so that this share of the
    activations beyond a block's input stays.
    """
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = MOST_COMPILED
    torch._functorch.config.activation_memory_budget = activation_budget
    count = 0
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.compile(fullgraph=True)
            count += 1
    return count


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
