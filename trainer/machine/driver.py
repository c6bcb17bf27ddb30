"""GPUs as NVIDIA's driver library reports them, by ctypes; no context is made, no memory taken."""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.config import environment
from trainer.machine.facts import Gpu, Version, version_from

LIBCUDA = ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")
LIBNVML = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")

# CUdevice_attribute of cuda.h: major and minor compute capability, and whether the GPU is integrated
_ATTRIBUTES = (75, 76, 18)
_NAME_BYTES = 256
_UUID_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class DriverReport:
    """Answers of libcuda: `cuda` is the newest that the driver runs, `problem` says why `gpus` is empty."""

    cuda: Version | None
    gpus: tuple[Gpu, ...]
    problem: str = ""


class CudaCallError(Exception):
    """A call of the driver library failed; the text is the call and the library's own name of the error."""


class Memory(ctypes.Structure):
    """nvmlMemory_t of nvml.h."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def query_gpus(
    libraries: tuple[str, ...] = LIBCUDA, nvml_libraries: tuple[str, ...] = LIBNVML
) -> DriverReport:
    """Visible GPUs in libcuda's order. Never raises.

    libcuda alone reads CUDA_VISIBLE_DEVICES (indices, UUIDs, MIG), and by CUDA_DEVICE_ORDER numbers GPUs as
    it will in the training processes, which are told the same order: a place in the answer is torch's number.
    An integrated GPU's memory is what the driver says, in bytes; the caller knows the host's. How much of a
    GPU's own memory is free NVML tells, by the GPU's UUID: libcuda would make a context for it.
    """
    version: Version | None = None
    library = _open(libraries)
    if library is None:
        return DriverReport(cuda=None, gpus=())
    environment.number_gpus_by_slot()
    try:
        number = _int(library, "cuDriverGetVersion")  # 13000 means 13.0
        version = (number // 1000, number % 1000 // 10)
        _call(library, "cuInit", ctypes.c_uint(0))
        places = range(_int(library, "cuDeviceGetCount"))
        gpus = tuple(_gpu(library, index) for index in places)
        uuids = tuple(_uuid(library, index) for index in places)
    except CudaCallError as error:
        return DriverReport(cuda=version, gpus=(), problem=str(error))
    free = _free_memory(uuids, nvml_libraries)
    found = zip(gpus, free, strict=True)
    told = (gpu if gpu.integrated else replace(gpu, free_memory_bytes=one) for gpu, one in found)
    return DriverReport(cuda=version, gpus=tuple(told))


def visible_uuids(libraries: tuple[str, ...] = LIBCUDA) -> tuple[str, ...]:
    """UUIDs of the visible GPUs in libcuda's order, `GPU-...`; "" of one whose UUID the driver does not tell,
    none without GPUs.
    """
    library = _open(libraries)
    if library is None:
        return ()
    environment.number_gpus_by_slot()
    try:
        _call(library, "cuInit", ctypes.c_uint(0))
        return tuple(_uuid(library, index) for index in range(_int(library, "cuDeviceGetCount")))
    except CudaCallError:
        return ()


def nvml_driver_version(libraries: tuple[str, ...] = LIBNVML) -> Version | None:
    """The driver's version from NVML, for hosts without /proc/driver/nvidia (WSL); None without an answer."""
    library = opened_nvml(libraries)
    if library is None:
        return None
    buffer = ctypes.create_string_buffer(_NAME_BYTES)
    failed = library.nvmlSystemGetDriverVersion(buffer, ctypes.c_uint(_NAME_BYTES))
    library.nvmlShutdown()
    return None if failed else version_from(buffer.value.decode())


def _open(libraries: tuple[str, ...]) -> ctypes.CDLL | None:
    for library in libraries:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(library)
    return None


def opened_nvml(libraries: tuple[str, ...]) -> ctypes.CDLL | None:
    """NVML, to be shut down; None where it is missing, does not answer, or is a stub for linking."""
    library = _open(libraries)
    try:
        return library if library is not None and library.nvmlInit_v2() == 0 else None
    except AttributeError:
        return None


def _gpu(library: ctypes.CDLL, index: int) -> Gpu:
    device = ctypes.c_int(_int(library, "cuDeviceGet", ctypes.c_int(index)))
    name, total = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    _call(library, "cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), device)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    major, minor, integrated = (
        _int(library, "cuDeviceGetAttribute", ctypes.c_int(attribute), device) for attribute in _ATTRIBUTES
    )
    return Gpu(
        name=name.value.decode(),
        capability=(major, minor),
        total_memory_bytes=total.value,
        integrated=bool(integrated),
    )


def _uuid(library: ctypes.CDLL, index: int) -> str:
    """The GPU's name for NVML, or ""; of a slice of a GPU (MIG) it is none that NVML knows as a GPU's."""
    device, raw = (
        ctypes.c_int(_int(library, "cuDeviceGet", ctypes.c_int(index))),
        (ctypes.c_ubyte * _UUID_BYTES)(),
    )
    try:
        _call(library, "cuDeviceGetUuid_v2", raw, device)
    except (CudaCallError, AttributeError):  # drivers before 11.4 do not have it
        return ""
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"


def _free_memory(uuids: Sequence[str], libraries: tuple[str, ...]) -> tuple[int | None, ...]:
    """Free bytes of each GPU; None for those of which NVML does not tell."""
    library = opened_nvml(libraries)
    if library is None:
        return (None,) * len(uuids)
    found: list[int | None] = []
    for one in uuids:
        handle, memory = ctypes.c_void_p(), Memory()
        known = library.nvmlDeviceGetHandleByUUID(one.encode(), ctypes.byref(handle)) == 0
        told = known and library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        found.append(memory.free if told else None)
    library.nvmlShutdown()
    return tuple(found)


def _int(library: ctypes.CDLL, function: str, *arguments: object) -> int:
    """The number that a function writes to its first argument."""
    value = ctypes.c_int()
    _call(library, function, ctypes.byref(value), *arguments)
    return value.value


def _call(library: ctypes.CDLL, function: str, *arguments: object) -> None:
    code = library[function](*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        library["cuGetErrorName"](ctypes.c_int(code), ctypes.byref(text))
        raise CudaCallError(f"{function}: {text.value.decode() if text.value else f'error {code}'}")
