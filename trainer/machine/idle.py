"""Whether anything else works on the GPUs that a measurement is made on, by nvidia-smi. No torch."""

from __future__ import annotations

import csv
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
VISIBLE = "CUDA_VISIBLE_DEVICES"
_HIDDEN = ("", "-1")
"""First values of CUDA_VISIBLE_DEVICES that hide every GPU."""


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
    (name, driver), (total, used, busy) = rows[0][:2], map(number, rows[0][2:])
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


def names_of(places: Sequence[int]) -> list[str]:
    """Names for nvidia-smi of GPUs, by their places among the visible ones."""
    given = environment.snapshot().get(VISIBLE)
    names = None if given is None else [name.strip() for name in given.split(",")]
    return [str(place) if names is None else names[place] for place in places]


def read_gpu(name: str | None = None) -> tuple[Gpu, list[str]] | None:
    """The GPU of that name, the first visible one if not given, and the processes on it.

    None where there is no nvidia-smi or all GPUs are hidden. Raises HardwareError where it fails.
    """
    if name is None:
        name = environment.snapshot().get(VISIBLE, "0").split(",")[0].strip()
    if name in _HIDDEN:
        return None
    try:
        gpu = ask(name, f"--query-gpu={_GPU_FIELDS}")
        processes = ask(name, f"--query-compute-apps={_PROCESS_FIELDS}")
    except FileNotFoundError:
        return None
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


def ask(name: str, query: str) -> str:
    """nvidia-smi's answer about a GPU as CSV without units.

    Raises HardwareError where it fails, FileNotFoundError where there is none.
    """
    command = ["nvidia-smi", "-i", name, query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except subprocess.CalledProcessError as error:
        said = (error.stdout or error.stderr).strip()
        remedy = "try `nvidia-smi`; TRAINER_PROFILE=cpu asks for no GPU"
        raise HardwareError(f"nvidia-smi failed: {said}", where=f"GPU {name}", remedy=remedy) from error
    except subprocess.TimeoutExpired as error:
        raise HardwareError("nvidia-smi does not answer", where=f"GPU {name}") from error


def number(text: str) -> int | None:
    """A figure of nvidia-smi; None where it does not know it."""
    return int(text) if text.strip().isdigit() else None
