"""Facts: JSON both ways, this machine, libcuda through a stand-in, torch's build without torch."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.planning.conftest import MACHINES, machine
from trainer.errors import ConfigError, HardwareError
from trainer.files import codec
from trainer.machine import driver, torch_build, verdicts
from trainer.machine.facts import (
    HostMemory,
    KernelVerdict,
    ReadVerdict,
    driver_text,
    facts_from_json,
    version_from,
)
from trainer.machine.reading import installed, read_facts, with_host_memory


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_facts_round_trip(path: Path) -> None:
    facts = facts_from_json(path.read_text(), str(path))
    assert facts_from_json(codec.to_json(facts), "again") == facts


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpu_count": 1}, "gpu_count"),
        ({"gpus": [{"name": "x", "capabillity": [8, 9]}]}, "gpus.0.capabillity"),
        ({"cpu_count": "4"}, "cpu_count"),
        ({"driver": [580, "x"]}, "driver.1"),
    ],
)
def test_unknown_keys_and_wrong_types_are_refused_by_name(change: dict[str, object], says: str) -> None:
    tree = json.loads((MACHINES / "cpu.json").read_text()) | change
    with pytest.raises(HardwareError) as caught:
        facts_from_json(json.dumps(tree), "mine.json")
    assert f"mine.json: {says}" in str(caught.value)


def test_recordings_of_version_0_1_are_read() -> None:
    text = (MACHINES / "h200.json").read_text()
    tree = json.loads(text) | {"shm_bytes": 137438953472}
    tree["gpus"][0]["index"] = 0
    tree["memory"]["swap_free_bytes"] = 0
    assert facts_from_json(json.dumps(tree), "mine.json") == facts_from_json(text, "h200.json")


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(HardwareError, match=r"mine\.json"):
        facts_from_json("{", "mine.json")


def test_versions() -> None:
    assert version_from("2.13.0+cu130") == (2, 13, 0)
    assert version_from("2.14.0a0+git1") == (2, 14, 0)
    assert version_from("580.95.05") == (580, 95, 5)
    assert driver_text((580, 95, 5)) == "580.95.05"


def test_this_machine_is_read_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from trainer.machine.reading import read_facts;"
        f"facts = read_facts(cache_dir=Path({str(tmp_path)!r}));"
        "assert 'torch' not in sys.modules and facts.torch is not None and facts.memory.available_bytes > 0"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_gpus_of_one_kind_are_alike_in_all_but_a_little_memory() -> None:
    one = machine("h200").gpu
    less = dataclasses.replace(one, total_memory_bytes=one.total_memory_bytes * 99 // 100)
    half = dataclasses.replace(one, total_memory_bytes=one.total_memory_bytes // 2)
    newer = dataclasses.replace(half, name="newer", capability=(10, 0))
    facts = dataclasses.replace(machine("h200"), gpus=(half, one, newer, less, one))
    assert facts.kinds == ((1, 3, 4), (2,), (0,)), "most memory first, then the newer"
    assert facts.gpu is one
    assert facts.on((2,)).gpus == (newer,)
    assert facts.besides((1, 3, 4)) == (half, newer)
    assert facts.on(()) is facts


def test_a_facts_file_stands_in(tmp_path: Path) -> None:
    path = MACHINES / "dgx-spark.json"
    assert read_facts(cache_dir=tmp_path, facts_file=path) == machine("dgx-spark")
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read_facts(cache_dir=tmp_path, facts_file=tmp_path / "missing.json")


def test_memory_of_an_integrated_gpu_is_the_hosts() -> None:
    memory = HostMemory(total_bytes=7, available_bytes=5)
    spark, desktop = machine("dgx-spark").gpus[0], machine("rtx-4090").gpus[0]
    changed = with_host_memory((spark, desktop), memory)
    assert [gpu.total_memory_bytes for gpu in changed] == [7, desktop.total_memory_bytes]


def test_packages_that_are_not_installed_are_left_out() -> None:
    assert list(installed(("pydantic", "no-such-package"))) == ["pydantic"]


FAKE_LIBCUDA = """
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
static char seen[256] = "NVIDIA GB10";
static void see(const char *name)
{ const char *value = getenv(name); strcat(seen, value ? value : "unset"); strcat(seen, ";"); }
int cuInit(unsigned flags)
{
    if (getenv("FAKE_TELLS")) { seen[0] = 0; see("CUDA_DEVICE_ORDER"); see("CUDA_VISIBLE_DEVICES"); }
    return getenv("FAKE_FAILS") ? 100 : 0;
}
int cuDriverGetVersion(int *v) { *v = 13010; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, seen, n); return 0; }
int cuDeviceTotalMem_v2(size_t *b, int d) { *b = 130674946048ul; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d)
{ *v = a == 75 ? 12 : a == 76 ? 1 : a == 18 ? !getenv("FAKE_OWN_MEMORY") : -1; return 0; }
int cuDeviceGetUuid_v2(unsigned char *u, int d)
{ if (getenv("FAKE_NO_UUID")) return 801; for (int i = 0; i < 16; i++) u[i] = 16 * i + d; return 0; }
int cuGetErrorName(int e, const char **s) { *s = "CUDA_ERROR_NO_DEVICE"; return 0; }
"""


FAKE_NVML = """
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
static int open = 0;
int nvmlInit_v2(void) { open++; return getenv("FAKE_NVML_FAILS") ? 9 : 0; }
int nvmlShutdown(void) { open--; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    *device = &open;
    return strcmp(uuid, "GPU-00102030-4050-6070-8090-a0b0c0d0e0f0") ? 6 : getenv("FAKE_NO_GPU") ? 6 : 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *found)
{
    if (device != &open || open != 1) return 1;
    found->total = 100ul << 30; found->free = 61ul << 30; found->used = 39ul << 30;
    return 0;
}
"""


def compiled(folder: Path, name: str, source: str) -> str:
    """A library made of C."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of a driver's library")
    (folder / f"{name}.c").write_text(source)
    library = folder / f"lib{name}.so"
    command = [compiler, "-w", "-shared", "-fPIC", "-o", str(library), str(folder / f"{name}.c")]
    subprocess.run(command, check=True)
    return str(library)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled(tmp_path_factory.mktemp("nvml"), "fakenvml", FAKE_NVML)


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled(tmp_path_factory.mktemp("libcuda"), "fakecuda", FAKE_LIBCUDA)


def test_free_memory_is_asked_by_the_gpus_name(
    libcuda: str, nvml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML numbers all GPUs of the machine, also those that are not visible: no number is handed to it."""
    monkeypatch.setenv("FAKE_OWN_MEMORY", "1")
    (gpu,) = driver.query_gpus((libcuda,), (nvml,)).gpus
    assert gpu.free_memory_bytes == 61 * 2**30
    assert gpu.in_use
    for variable in ("FAKE_NO_GPU", "FAKE_NVML_FAILS"):  # a slice of a GPU; a driver that is being updated
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            (gpu,) = driver.query_gpus((libcuda,), (nvml,)).gpus
            assert (gpu.free_memory_bytes, gpu.in_use) == (None, False)
    (gpu,) = driver.query_gpus((libcuda,), ("libnothing.so.1",)).gpus
    assert gpu.free_memory_bytes is None


def test_a_driver_that_cannot_name_a_gpu_still_shows_it(
    libcuda: str, nvml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OWN_MEMORY", "1")
    older = compiled(tmp_path, "oldcuda", FAKE_LIBCUDA.replace("cuDeviceGetUuid_v2", "cuDeviceGetUuid"))
    stub = compiled(tmp_path, "stubnvml", "int nvmlErrorString(int e) { return 0; }")
    for library, manager in ((older, nvml), (libcuda, stub)):
        (gpu,) = driver.query_gpus((library,), (manager,)).gpus
        assert (gpu.name, gpu.free_memory_bytes) == ("NVIDIA GB10", None)
    assert driver.nvml_driver_version((stub,)) is None
    monkeypatch.setenv("FAKE_NO_UUID", "1")
    (gpu,) = driver.query_gpus((libcuda,), (nvml,)).gpus
    assert (gpu.name, gpu.free_memory_bytes) == ("NVIDIA GB10", None)


def test_shared_memory_is_the_hosts_and_not_asked_for(libcuda: str, nvml: str) -> None:
    (gpu,) = driver.query_gpus((libcuda,), (nvml,)).gpus
    assert gpu.integrated and gpu.free_memory_bytes is None


def test_libcuda_is_asked_for_name_capability_memory_and_integration(libcuda: str) -> None:
    report = driver.query_gpus((libcuda,))
    assert report.cuda == (13, 1)
    (gpu,) = report.gpus
    assert (gpu.name, gpu.capability, gpu.integrated) == ("NVIDIA GB10", (12, 1), True)
    assert gpu.total_memory_bytes == 130674946048


def test_a_driver_that_shows_no_gpu_says_why(libcuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILS", "1")
    report = driver.query_gpus((libcuda,))
    assert (report.gpus, report.cuda, report.problem) == ((), (13, 1), "cuInit: CUDA_ERROR_NO_DEVICE")


MIG = "MIG-00000000-0000-0000-0000-000000000001"


@pytest.mark.parametrize(
    ("written", "order"), [(None, "PCI_BUS_ID"), ("", "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")]
)
@pytest.mark.parametrize("visible", ["1", "GPU-00000000-0000-0000-0000-000000000002", MIG])
def test_gpus_are_numbered_as_in_the_processes_that_train_and_the_driver_says_which_are_visible(
    libcuda: str, monkeypatch: pytest.MonkeyPatch, written: str | None, order: str, visible: str
) -> None:
    """libcuda reads both variables as it is initialised; it alone knows a UUID or a MIG device."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # is put back afterwards
    if written is None:
        monkeypatch.delenv("CUDA_DEVICE_ORDER")
    else:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", written)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("FAKE_TELLS", "1")
    (gpu,) = driver.query_gpus((libcuda,)).gpus
    assert gpu.name == f"{order};{visible};"
    assert os.environ["CUDA_DEVICE_ORDER"] == order, "processes that are started now see the same order"


def test_no_driver_is_no_error() -> None:
    assert driver.query_gpus(("libnothing.so.1",)).gpus == ()
    assert driver.nvml_driver_version(("libnothing.so.1",)) is None


VERSION_PY = """from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '2.13.0+cu130'
debug = False
cuda: Optional[str] = '13.0'
git_version = 'abc'
"""


def test_torch_version_file() -> None:
    assert torch_build.parse_version_file(VERSION_PY, "x") == ((2, 13, 0), (13, 0))
    cpu = VERSION_PY.replace("'13.0'", "None").replace("cu130", "cpu")
    assert torch_build.parse_version_file(cpu, "x") == ((2, 13, 0), None)
    with pytest.raises(HardwareError, match="names no version"):
        torch_build.parse_version_file("x = 1", "version.py")


def test_architectures_are_asked_once_and_again_after_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "version.py").write_text(VERSION_PY)
    asked: list[str] = []

    def child(program: str) -> list[str]:
        asked.append(program)
        return ["sm_90"]

    monkeypatch.setattr(torch_build, "torch_folder", lambda: folder)
    monkeypatch.setattr(torch_build, "_ask_child", child)
    for _ in range(2):
        build = torch_build.read_torch_build(recorded=None, cache_dir=tmp_path / "cache")
        assert build is not None and build.arch_list == ("sm_90",)
    assert len(asked) == 1
    (folder / "version.py").write_text(VERSION_PY + "\n")
    torch_build.read_torch_build(recorded=None, cache_dir=tmp_path / "cache")
    assert len(asked) == 2
    (folder / "version.py").write_text(VERSION_PY + "\n\n")
    cache = tmp_path / "other"
    build = torch_build.read_torch_build(recorded=None, cache_dir=cache, starts=False)
    assert build is not None and build.arch_list == () and not cache.exists(), "nobody asked, nothing is kept"
    assert len(asked) == 2


def test_the_child_imports_the_real_torch() -> None:
    import torch

    assert torch_build._ask_child(torch_build._CHILD) == torch.cuda.get_arch_list()
    with pytest.raises(HardwareError, match="torch does not import: no libcudnn"):
        torch_build._ask_child("raise SystemExit('no libcudnn')")


def test_architectures_without_a_visible_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 without a GPU: `get_arch_list` is empty, and the compiled list comes from its flags."""
    (tmp_path / "torch.py").write_text(
        "class version: cuda = '13.0'\n"
        "class cuda: get_arch_list = staticmethod(lambda: [])\n"
        "class _C: _cuda_getArchFlags = staticmethod(lambda: 'sm_80 sm_90')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert torch_build._ask_child(torch_build._CHILD) == ["sm_80", "sm_90"]


def test_no_architectures_are_no_answer_to_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, answers = tmp_path / "torch", [[], ["sm_90"]]
    folder.mkdir()
    (folder / "version.py").write_text(VERSION_PY)
    monkeypatch.setattr(torch_build, "torch_folder", lambda: folder)
    monkeypatch.setattr(torch_build, "_ask_child", lambda program: answers.pop(0))
    found = [torch_build.read_torch_build(recorded=None, cache_dir=tmp_path / "cache") for _ in range(3)]
    assert [build.arch_list for build in found if build] == [(), ("sm_90",), ("sm_90",)]


def test_a_recorded_build_is_believed_and_a_broken_one_named(tmp_path: Path) -> None:
    expected = machine("dgx-spark").torch
    path = tmp_path / "torch.json"
    path.write_text(codec.to_json(expected))
    assert torch_build.read_torch_build(recorded=path, cache_dir=tmp_path) == expected
    path.write_text("{}")
    with pytest.raises(HardwareError, match="TRAINER_TORCH_FACTS"):
        torch_build.read_torch_build(recorded=path, cache_dir=tmp_path)


def verdict(kernel: str, *, works: bool = True, shape: str = "s") -> KernelVerdict:
    return KernelVerdict(
        kernel=kernel, shape_class=shape, works=works, milliseconds=1.0, relative_error=1e-3, reason="r"
    )


def test_verdicts_merge_per_kernel_and_machine(tmp_path: Path) -> None:
    path, h200, spark = tmp_path / "new/verdicts.json", machine("h200"), machine("dgx-spark")
    assert verdicts.read_kept(path, h200).verdicts == ()
    assert verdicts.keep(path, h200, verdicts=[verdict("attention.flash"), verdict("attention.cudnn")])
    assert verdicts.keep(path, spark, verdicts=[verdict("attention.flash")])
    assert verdicts.keep(path, h200, verdicts=[verdict("attention.cudnn", works=False)])
    assert [(v.kernel, v.works) for v in verdicts.read_kept(path, h200).verdicts] == [
        ("attention.cudnn", False),
        ("attention.flash", True),
    ]
    assert len(verdicts.read_kept(path, spark).verdicts) == 1
    updated = dataclasses.replace(h200, driver=(590, 1))
    assert verdicts.read_kept(path, updated).verdicts == (), "another driver, other kernels"
    names = sorted(file.name for file in path.parent.iterdir())
    assert names == [".verdicts.json.lock", "verdicts.json"], "no temporary file stays"


def test_verdicts_of_several_kinds_are_told_apart(tmp_path: Path) -> None:
    path, h200, other = tmp_path / "verdicts.json", machine("h200"), machine("rtx-4090")
    mixed = dataclasses.replace(h200, gpus=(*other.gpus, *h200.gpus))
    for facts, works in ((h200, True), (dataclasses.replace(h200, gpus=other.gpus), False)):
        rate = ReadVerdict(disk="/", loader="parallel", state="cold", gib_per_second=float(works))
        assert verdicts.keep(path, facts, verdicts=[verdict("attention.flash", works=works)], readings=[rate])
    kept = verdicts.read_kept_of_all(path, mixed)
    found = dataclasses.replace(mixed, verdicts=kept.verdicts, readings=kept.readings)
    for place, works in ((0, False), (1, True)):
        here = found.on((place,))
        assert [row.works for row in here.verdicts] == [works]
        assert [row.gib_per_second for row in here.readings] == [float(works)]
    assert verdicts.read_kept_of_all(path, h200) == verdicts.read_kept(path, h200)


def test_verdicts_of_two_starts_at_once_are_all_kept(tmp_path: Path) -> None:
    path, h200 = tmp_path / "verdicts.json", machine("h200")
    names = [f"attention.{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda name: verdicts.keep(path, h200, verdicts=[verdict(name)]), names))
    assert {row.kernel for row in verdicts.read_kept(path, h200).verdicts} == set(names)


def test_verdicts_differ_by_type(tmp_path: Path) -> None:
    path, h200 = tmp_path / "verdicts.json", machine("h200")
    bf16 = verdict("attention.flash")
    fp16 = dataclasses.replace(bf16, dtype="fp16", works=False)
    assert verdicts.keep(path, h200, verdicts=[bf16])
    assert verdicts.keep(path, h200, verdicts=[fp16])
    assert verdicts.read_kept(path, h200).verdicts == (bf16, fp16)


@pytest.mark.parametrize("text", ["", "[]", "not json"])
def test_a_broken_verdict_file_counts_as_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "verdicts.json"
    path.write_text(text)
    assert verdicts.read_kept(path, machine("h200")).verdicts == ()
    assert verdicts.keep(path, machine("h200"), verdicts=[verdict("attention.flash")])


def test_verdicts_on_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not verdicts.keep(tmp_path / "file/verdicts.json", machine("h200"), verdicts=[verdict("a")])
