"""Floor 4: repeated blocks that are recomputed whole in backward, from outside what is compiled of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

RECOMPUTED: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
"""How blocks are recomputed. Nothing in them is drawn at random, and a CUDA graph could not restore a
generator's state.
"""


class Recomputed(torch.nn.Module):
    """A block that sees to being recomputed itself. Only ever the first base of a block's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the block's own; compiled blocks are compiled without what recomputes them."""
        call = super().__call__
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return checkpoint(call, *args, **RECOMPUTED, **kwargs)


def recompute_layers(model: torch.nn.Module) -> None:
    """Let the repeated blocks of a transformers model be recomputed.

    The library's own way is inside the block's forward: compiled with it, joined layers could not hand
    outputs to each other.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and not isinstance(module, Recomputed):
            give_base(module, Recomputed)


def give_base(block: torch.nn.Module, base: type[Recomputed]) -> None:
    """Let `base` be the first base of the block's class, which keeps its name: blocks are known by it."""
    one: Any = block
    kinds: Any = type(block), base
    one.__class__ = _with_base(*kinds)


# one class for all blocks of a kind: what is compiled for one serves the others
@functools.cache
def _with_base(kind: Any, base: Any) -> Any:
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__})
