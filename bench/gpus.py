"""Runs side by side, on one GPU or on several. No torch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from trainer.config import environment

T = TypeVar("T")
R = TypeVar("R")
_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible() -> list[str]:
    """The GPUs that a run may use, as CUDA_VISIBLE_DEVICES names them; one nameless where there is none."""
    given = environment.snapshot().get(_VARIABLE)
    if given is not None:
        return [name.strip() for name in given.split(",")]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return [""]
    # parts of a divided GPU are listed below it
    found = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(number) for number, _ in enumerate(found)] or [""]


def side_by_side(
    work: Callable[[T, Mapping[str, str]], R], items: Iterable[T], *, jobs: int, gpus: list[str] | None = None
) -> list[R]:
    """`work(item, environ)` for each item, `jobs` at a time; `environ` shows each its GPU only.

    GPUs are dealt out in turn: no more jobs than GPUs means that each run is alone on its own.
    """
    names = gpus or visible()
    free: SimpleQueue[str] = SimpleQueue()
    for number in range(jobs):
        free.put(names[number % len(names)])

    def one(item: T) -> R:
        gpu = free.get()
        try:
            return work(item, {**environment.snapshot(), **({_VARIABLE: gpu} if gpu else {})})
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, items))
