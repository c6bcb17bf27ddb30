"""The machine that measurements are made on: what it is, and whether anything else works on it. No torch."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config import environment
from trainer.errors import HardwareError

MOST_MEMORY_MIB = 1024
"""Memory that an idle GPU may hold: the driver's own, and a display's."""
MOST_UTILISATION = 5
"""Percent."""
_GPU_FIELDS = "name,driver_version,memory.total,memory.used,utilization.gpu"
_PROCESS_FIELDS = "pid,process_name,used_memory"
PATIENCE_SECONDS = 30.0
"""Waiting time for our own last process, which may take some seconds to disappear from the GPU."""
_HIDDEN = ("", "-1")
"""First values of CUDA_VISIBLE_DEVICES that hide every GPU."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine as a record describes it: no host name, no path."""

    gpu: str
    """Empty where there is none."""
    gpu_gib: float
    driver: str
    torch: str
    packages: str
    """Versions that a step's speed depends on besides torch."""
    cpu_cores: int
    architecture: str
    month: str
    """Year and month of the measurement: 2026-11."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi reports it; a figure that it does not know is None."""

    name: str
    driver: str
    total_mib: int | None
    used_mib: int | None
    utilisation: int | None


def parse_gpu(text: str) -> Gpu:
    """The one line of `nvidia-smi --query-gpu`. Raises HardwareError for anything else."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    if len(rows) != 1 or len(rows[0]) != len(_GPU_FIELDS.split(",")):
        raise HardwareError(
            f"nvidia-smi answered {text.strip()!r}",
            where="nvidia-smi --query-gpu",
            remedy="choose one GPU by CUDA_VISIBLE_DEVICES",
        )
    (name, driver), (total, used, busy) = rows[0][:2], map(_number, rows[0][2:])
    return Gpu(name=name, driver=driver, total_mib=total, used_mib=used, utilisation=busy)


def parse_processes(text: str) -> list[str]:
    """One description a process of `nvidia-smi --query-compute-apps`."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [f"process {row[0]} ({row[1]}, {row[2]} MiB)" for row in rows if len(row) == 3]


def why_busy(gpu: Gpu, processes: Sequence[str]) -> list[str]:
    """Reasons why a measurement on this GPU would be worthless; empty for an idle one."""
    reasons = [*processes]
    if gpu.used_mib is not None and gpu.used_mib > MOST_MEMORY_MIB:
        reasons.append(f"{gpu.used_mib} MiB are in use")
    if gpu.utilisation is not None and gpu.utilisation > MOST_UTILISATION:
        reasons.append(f"it is {gpu.utilisation} % busy")
    return reasons


def read_gpu() -> tuple[Gpu, list[str]] | None:
    """The GPU of the run and the processes on it; None where there is no nvidia-smi or all are hidden."""
    index = environment.snapshot().get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if index in _HIDDEN:
        return None
    try:
        gpu = _ask(index, f"--query-gpu={_GPU_FIELDS}")
        processes = _ask(index, f"--query-compute-apps={_PROCESS_FIELDS}")
    except FileNotFoundError:
        return None
    except subprocess.CalledProcessError as error:
        raise HardwareError(
            f"nvidia-smi failed: {(error.stdout or error.stderr).strip()}", where=f"GPU {index}"
        ) from error
    return parse_gpu(gpu), parse_processes(processes)


def require_gpu(*, remedy: str, read: Callable[[], tuple[Gpu, list[str]] | None] = read_gpu) -> None:
    """Raise HardwareError where no GPU can be measured; `remedy` is what the command offers instead."""
    if read() is None:
        raise HardwareError(
            "there is no GPU to measure: no nvidia-smi, or CUDA_VISIBLE_DEVICES hides every GPU",
            where="nvidia-smi",
            remedy=remedy,
        )


def require_idle(
    *,
    patience: float = 0.0,
    read: Callable[[], tuple[Gpu, list[str]] | None] = read_gpu,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Raise HardwareError where anything else uses the GPU, after waiting up to `patience` seconds for it."""
    waited = 0.0
    while True:
        found = read()
        reasons = [] if found is None else why_busy(*found)
        if not reasons:
            return
        if waited >= patience:
            raise HardwareError(
                f"the GPU is busy: {'; '.join(reasons)}",
                where="nvidia-smi",
                remedy="end what runs there, or choose another GPU by CUDA_VISIBLE_DEVICES",
            )
        sleep(1.0)
        waited += 1.0


def describe(month: str | None = None) -> Machine:
    """This machine; `month` in place of the clock's."""
    found = read_gpu()
    gpu = None if found is None else found[0]
    names = ("diffusers", "transformers", "peft")
    return Machine(
        gpu="" if gpu is None else gpu.name,
        gpu_gib=0.0 if gpu is None or gpu.total_mib is None else round(gpu.total_mib / 1024, 1),
        driver="" if gpu is None else gpu.driver,
        torch=importlib.metadata.version("torch"),
        packages=", ".join(f"{name} {importlib.metadata.version(name)}" for name in names),
        cpu_cores=len(os.sched_getaffinity(0)),
        architecture=platform.machine(),
        month=month or time.strftime("%Y-%m"),
    )


def _ask(index: str, query: str) -> str:
    command = ["nvidia-smi", "-i", index, query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None
