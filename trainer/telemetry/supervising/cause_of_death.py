"""The supervisor's questions to the kernel: memory that is left, OOM kills, why a process died."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from trainer.errors import ExitCode
from trainer.machine.host import parse_meminfo

MEMINFO = Path("/proc/meminfo")
_SELF_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")

CAUSES: dict[int, str] = {
    signal.SIGKILL: "killed from outside: by the kernel, the container runtime or another process",
    signal.SIGSEGV: "crashed in native code, most often in a GPU kernel or a library of the wrong version; "
    "`trainer probe CONFIG` tests the kernels one by one",
    signal.SIGABRT: "aborted by native code, most often a failed check in CUDA, cuDNN or NCCL; see above",
    signal.SIGBUS: "bus error: a memory-mapped file was cut short, or its disk failed; see dmesg on the host",
    signal.SIGILL: "illegal instruction: a library was built for another processor",
    signal.SIGFPE: "arithmetic error in native code",
}

ALSO_LOST = (
    "; NCCL ends a process so where another host is lost, and where this one has an error of its own: see"
    " which host ended first"
)
"""Addition to the cause of an abort where several hosts train: nothing here tells the two apart."""


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """MemAvailable of the host in bytes; None when it cannot be read."""
    try:
        return parse_meminfo(meminfo.read_text()).get("MemAvailable")
    except OSError:
        return None


def memory_events_path() -> Path | None:
    """The file that counts OOM kills in this process's cgroup; None without one. Source: cgroup-v2.rst."""
    try:
        rows = [line.split(":", 2) for line in _SELF_CGROUP.read_text().splitlines()]
    except OSError:
        return None
    candidates: list[Path] = []
    for _, controllers, group in rows:
        inside = group.lstrip("/")
        if controllers == "":
            candidates += [_CGROUP_ROOT / inside / "memory.events", _CGROUP_ROOT / "memory.events"]
        elif controllers == "memory":  # version 1
            candidates += [_CGROUP_ROOT / "memory" / inside / "memory.oom_control"]
            candidates += [_CGROUP_ROOT / "memory/memory.oom_control"]
    return next((path for path in candidates if path.is_file()), None)


def oom_kills(path: Path | None) -> int | None:
    """How many processes of the cgroup the kernel has killed for lack of memory; None when that cannot be
    read.
    """
    if path is None:
        return None
    try:
        found = re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def oom_kills_since(path: Path | None, before: int | None) -> int | None:
    """How many kills `path` counts since it counted `before`; None where either is not known."""
    now = oom_kills(path)
    return None if now is None or before is None else now - before


def order(returncode: int) -> int:
    """Order of what ranks ended with, the first cause first: a signal, since the others only lose their peer
    by it, an error of ours, an abort, which NCCL makes of a lost peer too, and an unexpected code.
    """
    if returncode in (ExitCode.PEER_LOST, -signal.SIGABRT):
        return 4 if returncode > 0 else 2
    return 0 if returncode < 0 else 1 if returncode in set(ExitCode) else 3


def explain_death(
    signum: int, *, oom_kills_since_start: int | None, several_hosts: bool = False
) -> tuple[int, str]:
    """Exit code and cause for a process that `signum` ended: 71 for an OOM kill, else 128 + signum. Kills are
    None where nothing counts them.
    """
    try:
        name = signal.Signals(signum).name
    except ValueError:  # real-time signals have no name of their own
        name = f"signal {signum}"
    if signum == signal.SIGKILL and oom_kills_since_start:
        counted = f"the cgroup's memory.events counts {oom_kills_since_start} oom_kill since the start"
        return ExitCode.OUT_OF_MEMORY, f"{name}: killed by the kernel for lack of memory ({counted})"
    cause = CAUSES.get(signum, "ended by a signal that this program does not use")
    if signum == signal.SIGKILL:
        counted = "; the cgroup's memory.events counts no oom_kill"
        unknown = "; whether for lack of memory no cgroup tells here: see dmesg on the host"
        cause += unknown if oom_kills_since_start is None else counted
    if signum == signal.SIGABRT and several_hosts:
        cause += ALSO_LOST
    return 128 + signum, f"{name}: {cause}"
