"""The machine as a record of measurements describes it: GPU, driver, packages, cores. No torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.machine.host import parse_meminfo, read_text
from trainer.machine.idle import read_gpu
from trainer.words.sizes import GIB

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine as a record describes it: no host name, no path."""

    gpu: str
    """Empty where there is none."""
    gpu_gib: float
    """Its memory; the host's where the GPU has none of its own, of which nvidia-smi says nothing."""
    driver: str
    torch: str
    packages: str
    """Versions that a step's speed depends on besides torch."""
    cpu_cores: int
    architecture: str
    month: str
    """Year and month of the measurement: 2026-11."""


def describe(month: str | None = None, *, gpus: Sequence[str] | None = None) -> Machine:
    """This machine; `month` in place of the clock's, and of the GPUs with these names for nvidia-smi the
    first one: the first visible one if not given, none of an empty list.
    """
    found = None if gpus is not None and not gpus else read_gpu(gpus[0] if gpus else None)
    gpu, gib = None if found is None else found[0], 0.0
    if gpu is not None:
        gib = _host_gib() if gpu.total_mib is None else gpu.total_mib / 1024
    names = ("diffusers", "transformers", "peft")
    return Machine(
        gpu="" if gpu is None else gpu.name,
        gpu_gib=round(gib, 1),
        driver="" if gpu is None else gpu.driver,
        torch=importlib.metadata.version("torch"),
        packages=", ".join(f"{name} {importlib.metadata.version(name)}" for name in names),
        cpu_cores=len(os.sched_getaffinity(0)),
        architecture=platform.machine(),
        month=month or time.strftime("%Y-%m"),
    )


def _host_gib() -> float:
    return parse_meminfo(read_text(_MEMINFO)).get("MemTotal", 0) / GIB
