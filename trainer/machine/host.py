"""The host's memory and driver as text files tell them. Every parser takes text or a folder."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.errors import HardwareError
from trainer.machine.facts import HostMemory, Version, version_from

# cgroup v1 writes "no limit" as the largest page-aligned integer
_V1_UNLIMITED_BYTES = 1 << 60
# lines of memory.stat and their signs: pages of files go before anything is killed, but for those not written
_CACHE = {"inactive_file": 1, "active_file": 1, "file_dirty": -1, "file_writeback": -1}
_V1_CACHE = {"inactive_file": 1, "active_file": 1, "dirty": -1, "writeback": -1}


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes by field name."""
    found = re.findall(r"^(\w+(?:\(\w+\))?):\s+(\d+) kB$", text, flags=re.MULTILINE)
    return {name: int(kibibytes) * 1024 for name, kibibytes in found}


def read_memory(meminfo: Path, cgroup_root: Path, self_cgroup: Path) -> HostMemory:
    """Host memory; available is min(MemAvailable, what the tightest cgroup leaves). Raises HardwareError."""
    try:
        fields = parse_meminfo(meminfo.read_text())
        total, available = fields["MemTotal"], fields["MemAvailable"]
    except (OSError, KeyError) as error:
        raise HardwareError(
            "the host's memory cannot be read (Linux is needed)",
            where=str(meminfo),
            remedy="use a recorded machine: --facts FILE",
        ) from error
    limits = cgroup_limits(cgroup_root, read_text(self_cgroup))
    for limit, used in limits:
        available = min(available, max(0, limit - used))
    return HostMemory(
        total_bytes=total,
        available_bytes=available,
        cgroup_limit_bytes=min((limit for limit, _ in limits), default=None),
    )


def cgroup_limits(root: Path, self_cgroup: str) -> list[tuple[int, int]]:
    """(limit, used) in bytes of every limiting cgroup above this process; page cache that can go is not used.

    `self_cgroup` is the text of /proc/self/cgroup. A limit may sit on any level of the tree, in v2 and v1.
    """
    paths = _paths(self_cgroup)
    if (root / "cgroup.controllers").exists():
        return _limits(root, paths.get("", "/"), ("memory.max", "memory.current", _CACHE))
    v1_path = next((path for names, path in paths.items() if "memory" in names.split(",")), "/")
    of_all = {f"total_{name}": sign for name, sign in _V1_CACHE.items()}
    return _limits(root / "memory", v1_path, ("memory.limit_in_bytes", "memory.usage_in_bytes", of_all))


def cgroup_cpus(root: Path, self_cgroup: str) -> float | None:
    """Processors' worth of time that the tightest cgroup above this process grants; None without a limit.

    Arguments as of `cgroup_limits`. Source: the kernel's cpu.max, of v1 cpu.cfs_quota_us and its period.
    """
    paths = _paths(self_cgroup)
    found = []
    if (root / "cgroup.controllers").exists():
        for group in _above(root, paths.get("", "/")):
            if limit := re.fullmatch(r"(\d+) (\d+)", read_text(group / "cpu.max").strip()):
                found.append(int(limit[1]) / int(limit[2]))
    else:
        path = next((path for names, path in paths.items() if "cpu" in names.split(",")), "/")
        for group in _above(root / "cpu", path):
            quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
            if quota and period:  # -1 is no limit, and no number of digits alone
                found.append(quota / period)
    return min(found, default=None)


def _paths(self_cgroup: str) -> dict[str, str]:
    """Paths of this process's groups by their controllers, which are empty for v2."""
    rows = re.findall(r"^(\d+):([^:]*):(.*)$", self_cgroup, re.M)
    return {controllers: path for _, controllers, path in rows}


def _above(root: Path, path: str) -> Iterator[Path]:
    """The folder of a group, and of those above it up to `root`.

    In a container the path of the host's tree does not exist below the root: the root is the own group then.
    """
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        yield group
        if group == root:
            return


def _limits(root: Path, path: str, files: tuple[str, str, Mapping[str, int]]) -> list[tuple[int, int]]:
    limit_name, usage_name, cache = files
    limits = []
    for group in _above(root, path):
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is not None and usage is not None and limit < _V1_UNLIMITED_BYTES:
            stat = dict(re.findall(r"^(\w+) (\d+)$", read_text(group / "memory.stat"), re.M))
            can_go = sum(sign * int(stat.get(name, 0)) for name, sign in cache.items())
            limits.append((limit, max(0, usage - max(0, can_go))))
    return limits


def parse_driver_version(text: str) -> Version | None:
    """Driver's version from /proc/driver/nvidia/version, proprietary and open kernel modules alike."""
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, flags=re.MULTILINE)
    return version_from(found.group(1)) if found else None


WSL_SPILLS = (
    "WSL: when GPU memory runs out, the driver moves it to host memory silently and training turns very slow;"
    " leave some free"
)
"""Warning of plans and probes on WSL."""


def is_wsl(proc_version: str) -> bool:
    """True for a kernel of the Windows Subsystem for Linux, from the text of /proc/version."""
    return "microsoft" in proc_version.lower()


def visible_devices_note(value: str | None) -> str:
    """How CUDA_VISIBLE_DEVICES changes which GPUs are seen; empty where it is not set."""
    if value is None:
        return ""
    note = f"CUDA_VISIBLE_DEVICES is {value!r}"
    return f"{note}, which hides every GPU" if value.strip() in ("", "all", "none", "void", "-1") else note


def digest_of_visible(environ: Mapping[str, str]) -> str:
    """Eight digits that stand for the variables which choose the visible GPUs, and hold no UUID; empty where
    none is set.
    """
    chosen = "|".join(environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))
    return hashlib.sha256(chosen.encode()).hexdigest()[:8] if chosen != "|" else ""


def read_text(path: Path) -> str:
    """The file's text, with bytes that are no UTF-8 as in names of files; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None
