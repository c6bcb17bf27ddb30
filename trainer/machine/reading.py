"""Reads this machine's facts, or a recorded file in their place. Never imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer.errors import ConfigError, HardwareError, Problem
from trainer.machine import driver, host, torch_build, verdicts
from trainer.machine.facts import Facts, Gpu, HostMemory, facts_from_json

PACKAGES = (
    "accelerate", "bitsandbytes", "prodigyopt", "wandb", "diffusers", "fastsafetensors", "flash-attn",
    "flash-attn-3", "flash-attn-4", "optimum-quanto", "peft", "safetensors", "torch", "transformers",
    "triton",
)  # fmt: skip
C_COMPILERS = ("cc", "gcc", "clang")
"""Compilers that Triton and torch.compile look for."""
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def read_facts(
    *,
    cache_dir: Path,
    facts_file: Path | None = None,
    named_by: str = "",
    torch_facts: Path | None = None,
    environ: Mapping[str, str] | None = None,
    starts: bool = True,
) -> Facts:
    """Facts of this machine, or those of `facts_file` (`--facts`, TRAINER_FACTS), verdicts included.

    `named_by` is the option or variable that named it. `torch_facts` is TRAINER_TORCH_FACTS, `environ` the
    process's environment, whose CUDA_VISIBLE_DEVICES is told with problems. Without `starts` no process is
    started to ask torch for its architectures. Raises ConfigError for a
    `facts_file` that cannot be read or parsed, HardwareError for the others.
    """
    if facts_file is not None:
        return read_recorded(facts_file, named_by)
    report = driver.query_gpus()
    memory = host.read_memory(_PROC / "meminfo", _CGROUPS, _PROC / "self/cgroup")
    driver_version = host.parse_driver_version(host.read_text(_PROC / "driver/nvidia/version"))
    if driver_version is None and report.cuda is not None:
        driver_version = driver.nvml_driver_version()
    problem = ""
    if not report.gpus and (driver_version or report.cuda):
        chosen = (environ or {}).get("CUDA_VISIBLE_DEVICES")
        notes = (report.problem or "libcuda is not visible", host.visible_devices_note(chosen))
        problem = "; ".join(note for note in notes if note)
    facts = Facts(
        architecture=platform.machine(),
        cpu_count=len(os.sched_getaffinity(0)),
        cpu_limit=host.cgroup_cpus(_CGROUPS, host.read_text(_PROC / "self/cgroup")),
        memory=memory,
        wsl=host.is_wsl(host.read_text(_PROC / "version")),
        driver=driver_version,
        driver_cuda=report.cuda,
        gpus=with_host_memory(report.gpus, memory),
        gpu_problem=problem,
        torch=torch_build.read_torch_build(recorded=torch_facts, cache_dir=cache_dir, starts=starts),
        packages=installed(PACKAGES),
        c_compiler=any(shutil.which(name) for name in C_COMPILERS),
    )
    kept = verdicts.read_kept_of_all(cache_dir / verdicts.FILE_NAME, facts)
    # of other GPUs of the same kind nothing was measured
    links = tuple(row for row in kept.links if row.visible == host.digest_of_visible(environ or {}))
    return dataclasses.replace(facts, verdicts=kept.verdicts, readings=kept.readings, links=links)


def read_recorded(path: Path, named_by: str = "") -> Facts:
    """Facts from a JSON file; raises ConfigError naming it, and `named_by` where an option or variable named
    it.
    """
    where = f"{named_by}={path}" if named_by else str(path)
    remedy = "give a file that `trainer probe --json` wrote"
    remedy += f", or leave {named_by} out for this machine" if named_by else ""
    try:
        return recorded(path.read_text(), where, remedy)
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is no text"
        raise ConfigError(f"the facts file {reason}", where=where, remedy=remedy) from error


def recorded(text: str, where: str, remedy: str = "give what `trainer probe --json` wrote") -> Facts:
    """Facts from JSON that is at `where`; raises ConfigError with this remedy."""
    try:
        return facts_from_json(text, where)
    except HardwareError as error:
        problems = [Problem(what=one.what, where=one.where, remedy=remedy) for one in error.problems]
        raise ConfigError(problems) from error


def with_host_memory(gpus: Iterable[Gpu], memory: HostMemory) -> tuple[Gpu, ...]:
    """Integrated GPUs share the host's memory: their total is MemTotal."""
    return tuple(
        dataclasses.replace(gpu, total_memory_bytes=memory.total_bytes) if gpu.integrated else gpu
        for gpu in gpus
    )


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed, from their metadata."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
