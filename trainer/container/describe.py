"""A machine and its abilities as rows for people; `trainer probe --json` has everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.container.appliance import VOLUMES
from trainer.errors import ConfigError, HardwareError
from trainer.machine.facts import Facts, driver_text, version_text
from trainer.machine.mounts import Mount
from trainer.machine.profiles import select_each
from trainer.planning.torch_and_driver import BF16_CAPABILITY
from trainer.ways.storages import WAYS
from trainer.words.plurals import numbered
from trainer.words.sizes import gib

Row = tuple[str, str]
"""Name and text."""
_WIDTH = 10


def text(rows: Sequence[Row]) -> list[str]:
    """One line a row, in two columns."""
    return [f"{name:<{_WIDTH}}{value}" for name, value in rows]


def machine_rows(facts: Facts, requested: str, toolkit: str) -> list[Row]:
    """The machine, the three CUDAs apart, the profile that a run would get, and the machine's abilities.

    `requested` is TRAINER_PROFILE, `toolkit` the installed CUDA toolkit in words.
    """
    memory, driver = facts.memory, driver_text(facts.driver)
    limit = memory.cgroup_limit_bytes
    limited = f", this container's limit is {gib(limit)}" if limit is not None else ""
    available = f"{gib(memory.available_bytes)} of {gib(memory.total_bytes)} host memory available{limited}"
    rows = [("machine", f"{facts.architecture}, {facts.processors}, {available}")]
    for gpu in facts.gpus:
        own = "shared with the CPU" if gpu.integrated else "of its own"
        capability = f"compute capability {version_text(gpu.capability)}"
        rows.append(("GPU", f"{gpu.name}, {capability}, {gib(gpu.total_memory_bytes)} {own}"))
    if not facts.gpus:
        rows.append(("GPU", facts.gpu_problem or "none"))
    if facts.driver_cuda is not None:
        rows.append(("driver", f"{driver}, runs CUDA {version_text(facts.driver_cuda)} and older"))
    else:
        rows.append(("driver", "none visible" if facts.driver is None else f"{driver}, without libcuda here"))
    packages = (f"{name} {version}" for name, version in sorted(facts.packages.items()))
    rows += [("runtime", _runtime(facts)), ("toolkit", toolkit), ("packages", ", ".join(packages))]
    try:
        first = select_each(facts, requested)[0]
    except (ConfigError, HardwareError):
        return [*rows, ("profile", f"TRAINER_PROFILE={requested} does not fit, see below")]
    profile = first.profile
    rows += [("profile", f"{profile.name}: {first.reason}"), *_abilities(first.facts, profile.device)]
    return [*rows, ("measured", _measured(facts))] if profile.device == "cuda" else rows


def volume_rows(mounts: Sequence[Mount]) -> list[Row]:
    """State of each of our volumes."""
    at = {mount.path: mount for mount in mounts}
    rows = []
    for volume in VOLUMES:
        mount = at.get(volume.path)
        state = "not mounted" if mount is None else "mounted, read-only" if mount.read_only else "mounted"
        rows.append((volume.path, f"{state}: {volume.meaning}"))
    return rows


def _runtime(facts: Facts) -> str:
    torch = facts.torch
    if torch is None:
        return "none: torch is not installed"
    if torch.cuda is None:
        return f"none: torch {version_text(torch.version)} is a CPU build"
    built = f" for {', '.join(torch.arch_list)}" if torch.arch_list else ""
    return f"CUDA {version_text(torch.cuda)}: torch {version_text(torch.version)} brings it, built{built}"


def _abilities(facts: Facts, device: str) -> Iterator[Row]:
    """Features that a run may use here, and why it may not use the others."""
    capability = facts.gpu.capability if device == "cuda" else (0, 0)
    can, cannot = [], []
    if device == "cpu":
        can.append("train in fp32 and bf16 on the CPU: tiny models, tests and the demo")
    elif capability >= BF16_CAPABILITY:
        can.append("train in bf16 and fp16")
    else:
        can.append("train in fp32 and fp16")
        cannot.append("bf16 (needs compute capability 8.0)")
    fp8, packed = WAYS["fp8"].least_capability, [way for way in WAYS.values() if way.package]
    if capability >= fp8:
        can.append("multiply a frozen base in FP8")
    elif device == "cuda":
        cannot.append(f"products in FP8 (need compute capability {version_text(fp8)})")
    stored = [way.weights for way in packed if way.package in facts.packages]
    if stored:
        can.append(f"store a frozen base in {' and '.join(stored)}")
    missing = (way for way in packed if way.weights not in stored)
    cannot += [f"{way.weights} ({way.package} is not installed)" for way in missing]
    if not facts.c_compiler:
        cannot.append("compiled blocks (no C compiler)")
    elif device == "cuda" and "triton" in facts.packages:
        can.append("compile blocks")
    elif device == "cuda":
        cannot.append("compiled blocks (triton is not installed)")
    yield "can", "; ".join(can)
    if cannot:
        yield "lacks", "; ".join(cannot)


def _measured(facts: Facts) -> str:
    if not facts.verdicts:
        return "nothing yet; `trainer train` does it once for each shape, `trainer probe CONFIG` now"
    works = sum(row.works for row in facts.verdicts)
    kernels, working = (
        numbered(len(facts.verdicts), "kernel"),
        numbered(works, "of them works", "of them work"),
    )
    return f"{kernels}, {working}: see the table"
