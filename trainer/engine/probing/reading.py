"""Rates at which the base model's own files reach the GPU, by loader, from disk and from the page cache.

The parent imports no torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.engine.probing.child import Child, last_words
from trainer.machine.facts import ReadVerdict
from trainer.planning.choose.loading import MOST_BYTES, OURS, PACKAGE, STATES

TIMEOUT_SECONDS = 30.0
LEAST_BYTES = 2**28
"""A smaller file is read in one piece by both loaders."""
_EVICTED_SHARE = 0.05
_READ_BYTES = 2**24


def largest(files: tuple[Path, ...]) -> Path | None:
    """The file to measure with; None where all of them are small."""
    sizes = {path: path.stat().st_size for path in files}
    found = max(sizes, key=lambda path: sizes[path], default=None)
    return found if found is not None and sizes[found] >= LEAST_BYTES else None


def probe_reading(
    file: Path, disk: str, environment: Mapping[str, str], *, device: str = "cuda:0"
) -> tuple[tuple[ReadVerdict, ...], str]:
    """Rates of both loaders in each state that the file could be brought into, and the error, if any.

    At most MOST_BYTES are read each time. A state that was not reached in time has a rate of 0, so that a
    slow disk is measured once, as others are.
    """
    child = Child(environment)
    try:
        answer = child.ask({"file": str(file), "device": device}, TIMEOUT_SECONDS)
    finally:
        child.end()
    rows = tuple(ReadVerdict(disk=disk, **row) for row in answer.rows)
    if answer.code is not None:
        trouble = last_words(answer.errors) or f"exit code {answer.code}"
        return rows, trouble if answer.code else ""
    found = {(row.loader, row.state): row for row in rows}
    every = tuple(
        found.get((loader, state), ReadVerdict(disk=disk, loader=loader, state=state, gib_per_second=0.0))
        for state in STATES
        for loader in (OURS, PACKAGE)
    )
    return every, f"not all was read within {TIMEOUT_SECONDS:.0f} s"


# from here on, in the process that reads


def measure(path: Path, loader: str, state: str, device: str, most: int = MOST_BYTES) -> float:
    """GiB a second at which the first `most` bytes of a file become tensors on the device."""
    import torch

    from trainer.modeling.base.reading import Choice, ShardReader

    choice = Choice(method="parallel", direct=state == "cold", reason="measured")
    if loader == PACKAGE:
        choice = Choice(method="fastsafetensors", reason="measured")
    with ShardReader(device, choice=lambda _: choice) as reader:
        # costs that a run pays once do not count: buffers are made and the library is imported before
        with reader.open(path) as shard:
            shard.get_tensor(next(iter(shard.ends)))
        _bring(path, state, most)
        started = time.perf_counter()
        with reader.open(path) as shard:
            read = 0
            for name, end in shard.ends.items():
                if read and end > most:
                    break
                shard.get_tensor(name)
                read = end
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
    return float(read / 2**30 / seconds)


def _bring(path: Path, state: str, most: int) -> None:
    """The first bytes of a file into the page cache, or out of it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if state == "cold":
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return
        for offset in range(0, min(most, os.fstat(descriptor).st_size), _READ_BYTES):
            os.pread(descriptor, _READ_BYTES, offset)
    finally:
        os.close(descriptor)


def print_rates(path: Path, device: str) -> None:
    """Measure both loaders in each state that the file can be brought into; a line of JSON for each."""
    from trainer.modeling.base.reading import page_cache_share

    for state in ("cold", "cached"):
        _bring(path, state, MOST_BYTES)
        share = page_cache_share(path)
        # a file in memory, or one that another process has mapped, is never cold
        if state == "cold" and (share is None or share > _EVICTED_SHARE):
            continue
        for loader in (OURS, PACKAGE):
            rate = round(measure(path, loader, state, device), 3)
            print(json.dumps({"loader": loader, "state": state, "gib_per_second": rate}), flush=True)
