"""Floor 2: what the machine is, read without torch; a JSON file can stand in for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator as the driver reports it."""

    index: int
    name: str
    capability: tuple[int, int]
    total_memory_bytes: int
    integrated: bool
    """True where CPU and GPU share one memory (DGX Spark); from the driver's attribute, never from the name."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host memory in bytes; available is min(MemAvailable, what the cgroup leaves)."""

    total_bytes: int
    available_bytes: int
    swap_free_bytes: int
    cgroup_limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The installed torch wheel: its version, the CUDA it was built for and the architectures it carries."""

    version: Version
    cuda: Version | None
    arch_list: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KernelVerdict:
    """What the probe measured for one kernel at one shape class; a crash is a verdict."""

    kernel: str
    """attention.flash, attention.cudnn, ..."""
    shape_class: str
    works: bool
    milliseconds: float | None
    relative_error: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything the plan may depend on. Recorded ones hold no serial numbers, UUIDs or host names."""

    architecture: str
    cpu_count: int
    memory: HostMemory
    shm_bytes: int
    wsl: bool
    driver: Version | None
    driver_cuda: Version | None
    gpus: tuple[Gpu, ...]
    torch: TorchBuild | None
    packages: Mapping[str, str] = field(default_factory=dict)
    verdicts: tuple[KernelVerdict, ...] = ()
