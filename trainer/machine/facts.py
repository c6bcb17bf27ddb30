"""Facts of the machine, read without torch; a JSON file can stand in for them."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainer.files import codec
from trainer.words.plurals import numbered

Version = tuple[int, ...]
_FORMER = {"index", "shm_bytes", "swap_free_bytes"}
"""Keys that version 0.1.0 recorded of GPUs, of the host and of its memory."""
EXCHANGED_BYTES = 2**26
"""Bytes that the probe exchanges as gradients, and twice as many as their sums."""
_IN_USE = 0.1
"""Share of a GPU's memory in use from which on others work on it: a display and the driver take less."""
_SYSTEMS_SHARE = 0.1
"""Share of the host's memory that its system has where nobody works on it; mostly it is less."""
_ALIKE = 0.02
"""Share by which the memory of GPUs of one kind may differ: a display or ECC takes some of it."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator as the driver reports it."""

    name: str
    capability: tuple[int, int]
    total_memory_bytes: int
    integrated: bool
    """True where CPU and GPU share one memory (DGX Spark); the driver's attribute, never the name."""
    free_memory_bytes: int | None = None
    """Memory that nobody used when it was asked; None where that cannot be told, and of shared memory."""

    @property
    def in_use(self) -> bool:
        """True where others use a good part of its memory."""
        free, total = self.free_memory_bytes, self.total_memory_bytes
        return free is not None and total - free > _IN_USE * total

    def is_like(self, other: Gpu) -> bool:
        """True for a GPU of the same kind: name, compute capability and, nearly, memory."""
        apart = abs(self.total_memory_bytes - other.total_memory_bytes)
        same = (self.name, self.capability, self.integrated)
        return same == (other.name, other.capability, other.integrated) and (
            apart <= _ALIKE * max(self.total_memory_bytes, other.total_memory_bytes)
        )


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host memory in bytes; available is min(MemAvailable, what the cgroup leaves)."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None = None

    def idle(self) -> HostMemory:
        """The memory as if programs that can be ended used none of it."""
        limit = self.total_bytes if self.cgroup_limit_bytes is None else self.cgroup_limit_bytes
        free = min(limit, int((1 - _SYSTEMS_SHARE) * self.total_bytes))
        return replace(self, available_bytes=max(self.available_bytes, free))


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The installed torch wheel: its version, the CUDA it was built for and the architectures it carries."""

    version: Version
    cuda: Version | None
    arch_list: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KernelVerdict:
    """The probe's figures of one kernel at one shape class in one type; a crash is a verdict too."""

    kernel: str
    """attention.flash, attention.cudnn, ..., matmul.fp8, matmul.bf16"""
    shape_class: str
    works: bool
    milliseconds: float | None
    relative_error: float | None
    reason: str
    dtype: str = "bf16"
    """`bf16`, `fp16` or `fp32`: the type of what went in; linear layers are measured in bf16 only."""
    gpu: str = ""
    """Name of the GPU that it was measured on, where the machine has GPUs of several kinds."""


@dataclass(frozen=True, kw_only=True)
class ReadVerdict:
    """The probe's figure of one way to read a base model's files to the GPU."""

    disk: str
    """The file system that they lie on: its kind and mount point."""
    loader: str
    """`parallel`, which is ours, or `fastsafetensors`."""
    state: str
    """`cold`, or `cached`: in the page cache."""
    gib_per_second: float
    """0 where the measurement was ended before it."""
    gpu: str = ""
    """Name of the GPU that it was measured on, where the machine has GPUs of several kinds."""


@dataclass(frozen=True, kw_only=True)
class LinkVerdict:
    """The probe's figures of the way between GPUs, all of one kind, in processes of their own."""

    gpus: int
    """Number of the GPUs that were measured together."""
    visible: str = ""
    """A digest of the variables that chose them; empty where none did."""
    places: tuple[int, ...] = ()
    """Their places among the visible ones; empty for all GPUs of these facts."""
    works: bool
    """Whether each read the memory of every other one, all at once, and found every byte as it was."""
    gib_per_second: float
    """The slowest reader's rate; 0 where they cannot read each other's memory."""
    exchange_ms: float
    """Time in which they exchanged 64 MiB each as gradients are, by NCCL; 0 where that failed."""
    reason: str
    gpu: str = ""
    """Name of the GPUs, where the machine has GPUs of several kinds."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything the plan may depend on. Recorded ones hold no serial numbers, UUIDs or host names."""

    architecture: str
    cpu_count: int
    """Processors that this process may run on."""
    memory: HostMemory
    wsl: bool
    driver: Version | None
    driver_cuda: Version | None
    gpus: tuple[Gpu, ...]
    gpu_problem: str = ""
    """Why a loaded driver shows no GPU: its own error, and CUDA_VISIBLE_DEVICES where that is set."""
    torch: TorchBuild | None
    packages: Mapping[str, str] = field(default_factory=dict)
    c_compiler: bool = False
    """Whether cc, gcc or clang is on the path: torch.compile builds its launchers with it."""
    verdicts: tuple[KernelVerdict, ...] = ()
    readings: tuple[ReadVerdict, ...] = ()
    links: tuple[LinkVerdict, ...] = ()
    cpu_limit: float | None = None
    """Processors' worth of time that a container's limit grants; None without one."""

    @property
    def cores(self) -> int:
        """Threads that compute at a time: more would wait for each other where time is limited."""
        return self.cpu_count if self.cpu_limit is None else min(self.cpu_count, math.ceil(self.cpu_limit))

    @property
    def processors(self) -> str:
        """The processors in words: `64 processors, this container's limit is 8`."""
        limited = "" if self.cores == self.cpu_count else f", this container's limit is {self.cpu_limit:g}"
        return f"{numbered(self.cpu_count, 'processor')}{limited}"

    @property
    def link(self) -> LinkVerdict | None:
        """Verdict on the way between these GPUs, or these and more; None where nothing was measured."""
        fitting = [row for row in self.links if row.gpus >= len(self.gpus) > 1]
        return min(fitting, key=lambda row: row.gpus, default=None)

    @property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Places in `gpus` of the GPUs of each kind, in their order.

        The kind with the most memory comes first, of equal ones the newer capability, then the one that is
        visible first: no order of slots decides how well a run on one GPU does.
        """
        groups: list[list[int]] = []
        for place, gpu in enumerate(self.gpus):
            alike = next((group for group in groups if self.gpus[group[0]].is_like(gpu)), None)
            if alike is None:
                groups.append([place])
            else:
                alike.append(place)

        def worth(group: Sequence[int]) -> tuple[int, tuple[int, int]]:
            gpu = self.gpus[group[0]]
            return gpu.total_memory_bytes, gpu.capability

        return tuple(tuple(group) for group in sorted(groups, key=worth, reverse=True))

    @property
    def gpu(self) -> Gpu:
        """The GPU that a run on one takes: the first of the first kind. IndexError where there is none."""
        return self.gpus[self.kinds[0][0]]

    def besides(self, places: Sequence[int]) -> tuple[Gpu, ...]:
        """The GPUs that are not at these places."""
        return tuple(gpu for place, gpu in enumerate(self.gpus) if place not in places)

    def idle(self) -> Facts:
        """The machine as if no other program used its GPUs."""
        gpus = tuple(replace(gpu, free_memory_bytes=None) for gpu in self.gpus)
        return replace(self, gpus=gpus)

    def on(self, places: Sequence[int]) -> Facts:
        """The machine as if only the GPUs at these places were visible, with what was measured on their kind.

        Without places, the machine as it is.
        """
        if not places:
            return self
        gpus = tuple(self.gpus[place] for place in places)
        names = {"", *(gpu.name for gpu in gpus)}
        return replace(
            self,
            gpus=gpus,
            verdicts=tuple(row for row in self.verdicts if row.gpu in names),
            readings=tuple(row for row in self.readings if row.gpu in names),
            links=tuple(
                replace(row, places=())
                for row in self.links
                if row.gpu in names and (not row.places or set(places) <= set(row.places))
            ),
        )


def facts_from_json(text: str, where: str) -> Facts:
    """Facts from JSON text; raises HardwareError at `where` for unknown or missing keys and wrong types.

    Recordings of version 0.1.0 are read too: its keys that nothing reads any more are passed over.
    """
    with contextlib.suppress(ValueError):  # the codec says where a text is no JSON
        text = json.dumps(json.loads(text, object_hook=_without_former))
    return codec.from_json(Facts, text, where)


def _without_former(tree: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in tree.items() if key not in _FORMER}


def version_from(text: str) -> Version:
    """Leading integers of a version: "580.95.05" -> (580, 95, 5), "2.13.0+cu130" -> (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def driver_text(version: Version | None) -> str:
    """A driver's version in NVIDIA's spelling, "580.95.05", or "unknown"."""
    if version is None:
        return "unknown"
    return ".".join(str(number) if place < 2 else f"{number:02d}" for place, number in enumerate(version))


def version_text(version: Version | None) -> str:
    """A version as text, "2.13.0", or "unknown"."""
    return "unknown" if version is None else ".".join(str(number) for number in version)
