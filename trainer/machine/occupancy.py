"""GPUs by UUID and the processes on them, as NVML tells. Makes no context and starts no process."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.machine.driver import LIBNVML, Memory, opened_nvml
from trainer.machine.idle import VISIBLE
from trainer.words.sizes import gib

_NAME_BYTES = 96
_PROCESSES = 64
"""Processes on a GPU that are asked for at first; more are asked for again."""
_INSUFFICIENT_SIZE = 7
_IN_USE = 0.1
"""Share of a GPU's memory in use from which on a process works there that NVML does not name."""


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvml.h."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """One GPU and who computes on it at this moment."""

    uuid: str
    index: int
    """Its number in nvidia-smi."""
    name: str
    pids: tuple[int, ...] = ()
    """Processes with a context on it, as the driver numbers them: in a container those of the host."""
    total_bytes: int | None = None
    used_bytes: int | None = None
    """Memory in use; None where it is the host's."""

    @property
    def use(self) -> str:
        """Words for its use by processes, `in use by PID 12`; empty for an idle one."""
        if self.pids:
            return f"in use by PID {', '.join(map(str, self.pids))}"
        if (
            self.used_bytes is None
            or self.total_bytes is None
            or self.used_bytes <= _IN_USE * self.total_bytes
        ):
            return ""
        return f"in use by a process that cannot be seen from here, with {gib(self.used_bytes)}"


def gpu_uses(libraries: tuple[str, ...] = LIBNVML) -> tuple[GpuUse, ...]:
    """All GPUs that NVML shows, by nvidia-smi's numbers; none without NVML. A GPU that does not answer, as
    one that fell off its bus, is left out.
    """
    library = opened_nvml(libraries)
    if library is None:
        return ()
    count = ctypes.c_uint()
    failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    found = [] if failed else [_gpu_use(library, index) for index in range(count.value)]
    library.nvmlShutdown()
    return tuple(gpu for gpu in found if gpu is not None)


def visible(gpus: tuple[GpuUse, ...], environ: Mapping[str, str]) -> tuple[GpuUse, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by numbers or beginnings of UUIDs; all without it."""
    text = environ.get(VISIBLE)
    if text is None:
        return gpus
    words = [word.strip() for word in text.split(",")]
    return tuple(gpu for gpu in gpus if any(is_named(gpu, word) for word in words))


def is_named(gpu: GpuUse, word: str) -> bool:
    """True if `word` is the GPU's number, or the beginning of its UUID."""
    return word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))


def _gpu_use(library: ctypes.CDLL, index: int) -> GpuUse | None:
    device = ctypes.c_void_p()
    name, uuid = (ctypes.create_string_buffer(_NAME_BYTES) for _ in range(2))
    size = ctypes.c_uint(_NAME_BYTES)
    if (
        library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
        or library.nvmlDeviceGetUUID(device, uuid, size)
        or library.nvmlDeviceGetName(device, name, size)
    ):
        return None
    memory = Memory()
    told = library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    return GpuUse(
        uuid=uuid.value.decode(),
        index=index,
        name=name.value.decode(),
        pids=_pids(library, device),
        total_bytes=memory.total if told else None,
        used_bytes=memory.used if told else None,
    )


def _pids(library: ctypes.CDLL, device: ctypes.c_void_p) -> tuple[int, ...]:
    """Processes that compute on a GPU; none where the driver does not tell, as those before 510."""
    room = _PROCESSES
    while True:
        count, rows = ctypes.c_uint(room), (_Process * room)()
        try:
            code = library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), rows)
        except AttributeError:
            return ()
        if code != _INSUFFICIENT_SIZE:
            return () if code else tuple(sorted(row.pid for row in rows[: count.value]))
        room *= 2
