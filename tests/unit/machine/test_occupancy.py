"""Who uses which GPU, by a stand-in of NVML in C whose structs are those of nvml.h."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.machine.test_facts import compiled
from trainer.machine.occupancy import GpuUse, gpu_uses, visible

FAKE_NVML = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct {
    unsigned int pid; unsigned long long usedGpuMemory; unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
static int devices[3], open = 0;
int nvmlInit_v2(void) { open++; return 0; }
int nvmlShutdown(void) { open--; return 0; }
int nvmlDeviceGetCount_v2(unsigned int *n) { *n = 3; return open == 1 ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **d)
{ *d = &devices[i]; return i == 1 && getenv("FAKE_LOST") ? 15 : 0; }
int nvmlDeviceGetUUID(void *d, char *s, unsigned int n)
{ return snprintf(s, n, "GPU-%d", (int)((int *)d - devices)) < 0; }
int nvmlDeviceGetName(void *d, char *s, unsigned int n) { strncpy(s, "Fake", n); return 0; }
int nvmlDeviceGetMemoryInfo(void *d, nvmlMemory_t *m)
{ m->total = 80; m->used = 3; m->free = 77; return d == &devices[2] ? 3 : 0; }
int PROCESSES(void *d, unsigned int *count, nvmlProcessInfo_t *rows)
{
    unsigned int there = d == &devices[1] ? 200 : d == &devices[0] ? 0 : 1, room = *count;
    *count = there;
    if (room < there) return 7;
    for (unsigned int i = 0; i < there; i++) rows[i] = (nvmlProcessInfo_t){1000 + there - i, 5, ~0u, ~0u};
    return 0;
}
"""
CURRENT = FAKE_NVML.replace("PROCESSES", "nvmlDeviceGetComputeRunningProcesses_v3")


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled(tmp_path_factory.mktemp("nvml"), "usednvml", CURRENT)


def test_every_gpu_is_told_with_all_its_processes(nvml: str) -> None:
    idle, busy, shared = gpu_uses((nvml,))
    assert (idle.uuid, idle.index, idle.name, idle.pids, idle.used_bytes) == ("GPU-0", 0, "Fake", (), 3)
    assert busy.pids == tuple(range(1001, 1201))  # more than are asked for at first
    assert (shared.pids, shared.total_bytes, shared.used_bytes) == ((1001,), None, None)
    assert [gpu.use for gpu in (idle, shared)] == ["", "in use by PID 1001"]
    assert len(gpu_uses((nvml,))) == 3  # it was shut down in between


def test_a_gpu_that_fell_off_its_bus_is_left_out(nvml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LOST", "1")
    assert [gpu.index for gpu in gpu_uses((nvml,))] == [0, 2]


def test_without_nvml_there_is_none(tmp_path: Path) -> None:
    assert gpu_uses(("libnothing.so.1",)) == ()


def test_an_older_driver_names_no_process(tmp_path: Path) -> None:
    older = compiled(
        tmp_path, "oldnvml", FAKE_NVML.replace("PROCESSES", "nvmlDeviceGetComputeRunningProcesses")
    )
    assert [gpu.pids for gpu in gpu_uses((older,))] == [(), (), ()]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, [0, 1, 2]),
        ("2,0", [0, 2]),
        ("GPU-ab", [1]),
        ("GPU-a", [0, 1]),
        ("-1", []),
        ("", []),
        ("MIG-x", []),
    ],
)
def test_hidden_gpus_are_not_the_queues(text: str | None, seen: list[int]) -> None:
    gpus = tuple(GpuUse(uuid=uuid, index=k, name="") for k, uuid in enumerate(("GPU-aa", "GPU-ab", "GPU-c")))
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert [gpu.index for gpu in visible(gpus, environ)] == seen
