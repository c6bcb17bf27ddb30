"""Repeated blocks that keep nothing but their input for backward.

Uncompiled blocks are computed twice. A compiled block's backward graph recomputes only the activations that
it reads, which leaves out the last products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

Around = AbstractContextManager[Any]
"""A context that is entered around a call of a block."""


class Recomputed(torch.nn.Module):
    """A block that recomputes itself in backward. Given to a block's class as first base."""

    recomputes: bool = True
    """False for a block that keeps its activations: all blocks of a kind stay of one class."""
    draws: bool = False
    """True for a block with dropout, which must be the same when it is recomputed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own call, recomputed in backward; a compiled block is compiled without this."""
        call = super().__call__
        if not (self.recomputes and torch.is_grad_enabled()):
            return call(*args, **kwargs)
        return recomputed(call, args, kwargs, draws=self.draws)


def recomputed(
    call: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
    *,
    draws: bool,
    contexts: Callable[[], tuple[Around, Around]] = noop_context_fn,
) -> Any:
    """The result of `call`, called again for backward, with the same random numbers where it `draws`.

    `contexts` makes the contexts around both calls. torch's checkpoint finds the device whose RNG state it
    restores by positional tensors only, so named inputs are passed by position too.
    """

    def run(*values: Any) -> Any:
        return call(*values[: len(args)], **dict(zip(named, values[len(args) :], strict=True)))

    # a CUDA graph cannot restore the RNG state, but captured blocks draw nothing
    return checkpoint(
        run,
        *args,
        *named.values(),
        use_reentrant=False,
        preserve_rng_state=draws,
        context_fn=contexts,
    )


class RecomputedInside(torch.nn.Module):
    """A block to be compiled so that its graph keeps its inputs alone. Given to its class as first base.

    Blocks that keep their activations have another class, and so no graph in common with these.
    """


Blocks = Mapping[str, torch.nn.Module]
"""A model's repeated blocks by name, in the model's order, which is the order in which they compute."""


def repeated_blocks(model: torch.nn.Module, kinds: Sequence[str]) -> Blocks:
    """The modules whose class is named in `kinds`, a family's `blocks`."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ in kinds}


def recompute_blocks(blocks: Blocks, count: int = 0, *, draws: bool = False, inside: bool = False) -> int:
    """Let the first `count` blocks be recomputed in backward, or all for 0, and return their number.

    `draws` says that the blocks contain dropout. `inside` says that they will be compiled with the
    recomputation in their own graph, which blocks with dropout cannot.

    The libraries' own ways recompute all or nothing, and transformers' is inside the block's forward:
    compiled with it, joined layers could not hand outputs to each other.
    """
    chosen = min(count, len(blocks)) if count else len(blocks)
    assert not (inside and draws), "the graph of a block with dropout would draw another mask"
    for number, block in enumerate(blocks.values()):
        if inside:
            if number < chosen and not isinstance(block, RecomputedInside):
                give_base(block, RecomputedInside)
            continue
        if not isinstance(block, Recomputed):
            give_base(block, Recomputed)
        assert isinstance(block, Recomputed)
        # one class for all blocks, so that all share one compiled graph
        block.recomputes, block.draws = number < chosen, draws
    return chosen


def has_dropout(model: torch.nn.Module) -> bool:
    """True if the adapter or the base itself has dropout."""
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())


def give_base(block: torch.nn.Module, base: type[torch.nn.Module]) -> None:
    """Let `base` be the first base of the block's class, which keeps its name: blocks are known by it."""
    one: Any = block
    kinds: Any = type(block), base
    one.__class__ = _with_base(*kinds)


# one class for all blocks of a kind with the same base, so that all share one compiled graph
@functools.cache
def _with_base(kind: Any, base: Any) -> Any:
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__})
