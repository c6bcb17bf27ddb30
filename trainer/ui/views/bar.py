"""The bar above every page: GPUs and host memory of this machine, and the disk that runs are written to."""

from __future__ import annotations

import functools
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.machine.facts import Facts, Gpu
from trainer.planning import planning
from trainer.ui.studio import Studio

_KEPT_SECONDS = 5


@dataclass(frozen=True, kw_only=True)
class BarView:
    """Figures of the machine at one moment."""

    gpus: tuple[Gpu, ...]
    no_gpu: str
    """Why there is none, in the driver's words; empty where there are some."""
    available_bytes: int
    """Host memory that a program can still get; of a machine with one memory its GPU's, too."""
    total_bytes: int
    disk_free_bytes: int


def bar_view(studio: Studio) -> BarView:
    """The machine as it was at most 5 s ago."""
    facts = _facts(int(time.monotonic()) // _KEPT_SECONDS)
    return BarView(
        gpus=facts.gpus,
        no_gpu="" if facts.gpus else facts.gpu_problem or "no NVIDIA driver is here",
        available_bytes=facts.memory.available_bytes,
        total_bytes=facts.memory.total_bytes,
        disk_free_bytes=shutil.disk_usage(there(studio.runs)).free,
    )


@functools.lru_cache(maxsize=1)
def _facts(tick: int) -> Facts:
    return planning.machine_facts(starts=False)


def there(path: Path) -> Path:
    """The nearest folder above `path` that exists, and that this user can see."""
    return next(one for one in (path, *path.parents) if os.path.isdir(one))  # noqa: PTH112
