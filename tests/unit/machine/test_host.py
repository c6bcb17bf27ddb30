"""Recorded /proc and cgroup files."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.errors import HardwareError
from trainer.machine import host

KIB = 1024
MEMINFO = """MemTotal:       127607088 kB
MemFree:         2147352 kB
MemAvailable:   98765432 kB
Buffers:          512340 kB
SwapCached:            0 kB
Active(anon):    1234567 kB
SwapFree:       16777212 kB
HugePages_Total:       0
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def memory(tmp_path: Path, self_cgroup: str = "0::/\n") -> host.HostMemory:
    write(tmp_path / "meminfo", MEMINFO)
    write(tmp_path / "self_cgroup", self_cgroup)
    return host.read_memory(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "self_cgroup")


def test_available_is_memavailable_not_memfree(tmp_path: Path) -> None:
    found = memory(tmp_path)
    assert found.available_bytes == 98765432 * KIB
    assert found.total_bytes == 127607088 * KIB
    assert found.cgroup_limit_bytes is None


def test_cgroup_v2_limit_of_a_parent_counts_and_page_cache_does_not(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root / "cgroup.controllers", "cpu memory")
    write(root / "box/memory.max", str(8 * 1024**3))
    write(root / "box/memory.current", str(5 * 1024**3))
    write(root / "box/memory.stat", f"anon 1\ninactive_file {2 * 1024**3}\n")
    write(root / "box/job/memory.max", "max\n")
    write(root / "box/job/memory.current", "123\n")
    found = memory(tmp_path, "0::/box/job\n")
    assert found.cgroup_limit_bytes == 8 * 1024**3
    assert found.available_bytes == (8 - (5 - 2)) * 1024**3


def test_the_tightest_limit_of_processors_above_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root / "cgroup.controllers", "cpu memory")
    write(root / "box/cpu.max", "250000 100000\n")
    write(root / "box/job/cpu.max", "max 100000\n")
    assert host.cgroup_cpus(root, "0::/box/job\n") == 2.5
    write(root / "box/job/cpu.max", "80000 40000\n")
    assert host.cgroup_cpus(root, "0::/box/job\n") == 2.0
    assert host.cgroup_cpus(root, "0::/other\n") is None


@pytest.mark.parametrize(("quota", "limit"), [("150000", 1.5), ("-1", None)])
def test_a_limit_of_processors_of_cgroup_v1(quota: str, limit: float | None, tmp_path: Path) -> None:
    """In a container the own group is the root."""
    write(tmp_path / "cpu/cpu.cfs_quota_us", f"{quota}\n")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000\n")
    assert host.cgroup_cpus(tmp_path, "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n") == limit


def test_page_cache_that_was_read_twice_can_go_and_what_is_to_be_written_cannot(tmp_path: Path) -> None:
    """The kernel takes active pages of files too before it kills, as MemAvailable counts them."""
    gib = 1024**3
    root = tmp_path / "cgroup"
    write(root / "cgroup.controllers", "cpu memory")
    write(root / "memory.max", str(64 * gib))
    write(root / "memory.current", str(50 * gib))
    lines = {"inactive_file": 4, "active_file": 44, "file_dirty": 2, "file_writeback": 1}
    write(root / "memory.stat", "".join(f"{name} {size * gib}\n" for name, size in lines.items()))
    assert memory(tmp_path).available_bytes == (64 - (50 - 45)) * gib
    (root / "cgroup.controllers").unlink()
    write(root / "memory/memory.limit_in_bytes", str(64 * gib))
    write(root / "memory/memory.usage_in_bytes", str(50 * gib))
    names = {"total_inactive_file": 4, "total_active_file": 44, "total_dirty": 2, "total_writeback": 1}
    write(root / "memory/memory.stat", "".join(f"{name} {size * gib}\n" for name, size in names.items()))
    assert memory(tmp_path, "4:memory:/\n").available_bytes == (64 - (50 - 45)) * gib


def test_cgroup_v1_in_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup/memory"
    write(root / "memory.limit_in_bytes", str(4 * 1024**3))
    write(root / "memory.usage_in_bytes", str(1024**3))
    found = memory(tmp_path, "4:memory:/docker/0123\n0::/\n")
    assert found.cgroup_limit_bytes == 4 * 1024**3
    assert found.available_bytes == 3 * 1024**3


def test_cgroup_v1_without_limit(tmp_path: Path) -> None:
    root = tmp_path / "cgroup/memory"
    write(root / "memory.limit_in_bytes", "9223372036854771712")
    write(root / "memory.usage_in_bytes", str(1024**3))
    assert memory(tmp_path, "4:memory:/\n").cgroup_limit_bytes is None


def test_usage_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "cgroup/memory"
    write(root / "memory.limit_in_bytes", str(1024**3))
    write(root / "memory.usage_in_bytes", str(2 * 1024**3))
    assert memory(tmp_path, "4:memory:/\n").available_bytes == 0


def test_a_host_without_meminfo_is_named(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="meminfo"):
        host.read_memory(tmp_path / "meminfo", tmp_path, tmp_path / "self")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 2025\nGCC version: 12\n",
            (550, 163, 1),
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (x@y)\n",
            (580, 95, 5),
        ),
        ("", None),
    ],
)
def test_driver_version(text: str, version: tuple[int, ...] | None) -> None:
    assert host.parse_driver_version(text) == version


def test_wsl() -> None:
    assert host.is_wsl("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@x) (gcc 11.2.0) #1 SMP")
    assert not host.is_wsl("Linux version 6.8.0-31-generic (buildd@lcy02) #31-Ubuntu SMP")


@pytest.mark.parametrize("value", ["all", "", "-1", "none"])
def test_values_that_hide_every_gpu_are_explained(value: str) -> None:
    assert "hides every GPU" in host.visible_devices_note(value)


def test_indices_hide_nothing() -> None:
    assert host.visible_devices_note("0,1") == "CUDA_VISIBLE_DEVICES is '0,1'"
    assert host.visible_devices_note(None) == ""
