"""Starts of runs by torchrun and accelerate launch, which start a trainer for each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable

Wrapped = Callable[[list[str]], list[str]]
"""The command of a launcher that starts a module with its arguments, `-m MODULE ...`."""


def torchrun(count: int, *options: str) -> Wrapped:
    """By torchrun, which takes a free port of its own."""
    started = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={count}", *options]
    return lambda words: [*started, *words]


def accelerate(count: int, *options: str) -> Wrapped:
    """By accelerate launch; with `--multi_gpu` it starts several processes where there is no GPU too."""
    started = [sys.executable, "-m", "accelerate.commands.launch", f"--num_processes={count}", *options]
    return lambda words: [*started, *words]
