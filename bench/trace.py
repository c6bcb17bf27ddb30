"""Summarise a torch profiler trace of steps: device time by kind of kernel, gaps, copies. No torch here.

A trace is Chrome's JSON as `torch.profiler` exports it; times in it are microseconds.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL_MATMUL_MICROSECONDS = 35.0
"""A matmul that is done sooner has a side of the adapter's rank or of the batch: a frozen layer's own
takes longer on every GPU that this is run on."""

_GROUPS: tuple[tuple[str, str], ...] = (
    ("triton reductions", r"^triton_(red|per)_"),
    ("triton pointwise", r"^triton_(poi|for)_"),
    ("attention backward", r"bprop|flash_bwd|fmha_?cutlassB|dot_do_o|convert_dq|attention.*backward"),
    ("attention forward", r"fprop|flash_fwd|fmha_?cutlassF|attention.*forward|attention"),
    ("optimizer", r"multi_tensor_apply|FusedAdam|_adamw|lpnorm|foreach"),
    ("split-K sums", r"split_?k_?reduce|splitK"),
    ("matmul fp8", r"nvjet_(sm\d+_)?q|(cutlass|xmma|gemm|device_kernel).*(e4m3|e5m2|f8f8)"),
    ("quantise and transpose", r"quant|absmax|transpose|fp8|float8"),
    ("matmul int8", r"s8s8|int8|i8816|imma"),
    (
        "matmul bf16",
        r"nvjet|gemm|gemv|cutlass|xmma|^triton_(tem|mm)|ampere_.*bf16|sm\d+_.*mma|matmul|::mm|addmm",
    ),
    ("reductions", r"reduce_kernel|norm|RowwiseMoments|softmax|GammaBeta|reduction"),
    ("other triton", r"^triton_"),
    ("copies by kernels", r"direct_copy|CatArray|copy_kernel|index|gather|scatter"),
    ("pointwise", r"elementwise|fill|FillFunctor|unrolled"),
)
_PATTERNS = tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in _GROUPS)
_SMALL = "small matmul (LoRA, modulation)"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One piece of work of the device."""

    name: str
    start: float
    """Microseconds."""
    duration: float
    kind: str
    """`kernel`, `memcpy`, `memset`, or `cpu_op` where there is no device."""


@dataclass(frozen=True, kw_only=True)
class GroupTime:
    """One row of the table: a kind of kernel, or a kernel by name."""

    name: str
    milliseconds: float
    """Per step."""
    count: float
    """Launches per step."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """One time in which the device had nothing to do, in milliseconds."""

    milliseconds: float
    after: str
    before: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The time of one trace's steps by kind of work; times are milliseconds per step."""

    steps: int
    wall: float
    """Time from the first kernel's start to the last one's end."""
    busy: float
    """Union of all kernels' times."""
    groups: tuple[GroupTime, ...]
    kernels: tuple[GroupTime, ...]
    gaps: tuple[Gap, ...]
    """The longest first."""

    @property
    def busy_fraction(self) -> float:
        """Share of the wall time in which the device worked."""
        return self.busy / self.wall if self.wall else 0.0

    @property
    def copy_share(self) -> float:
        """Share of the wall time that memcpy and memset take."""
        copied = sum(group.milliseconds for group in self.groups if group.name in ("memcpy", "memset"))
        return copied / self.wall if self.wall else 0.0


def read_trace(path: Path) -> list[Kernel]:
    """Device work of an exported trace in the order of its start; the CPU's operators where there is none."""
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    return kernels_of(json.loads(text)["traceEvents"])


def kernels_of(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """The kernels of a trace's list of events, in the order of their start."""
    complete = [event for event in events if event.get("ph") == "X"]
    kinds = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
    found = [
        Kernel(name=event["name"], start=event["ts"], duration=event["dur"], kind=kinds[event["cat"]])
        for event in complete
        if event.get("cat") in kinds
    ]
    return sorted(found or _outermost(complete), key=lambda kernel: kernel.start)


def _outermost(events: Sequence[Mapping[str, Any]]) -> list[Kernel]:
    """CPU operators that no other one calls."""
    found: list[Kernel] = []
    ends: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event.get("cat") == "cpu_op" and event["ts"] >= ends.get(event["tid"], 0.0):
            ends[event["tid"]] = event["ts"] + event["dur"]
            found.append(Kernel(name=event["name"], start=event["ts"], duration=event["dur"], kind="cpu_op"))
    return found


def group_of(kernel: Kernel) -> str:
    """The kind of work a kernel does, by its name; `other` where no name of ours fits."""
    if kernel.kind in ("memcpy", "memset"):
        return kernel.kind
    group = next((group for group, pattern in _PATTERNS if pattern.search(kernel.name)), "other")
    small = group == "split-K sums" or (
        group.startswith("matmul") and kernel.duration < SMALL_MATMUL_MICROSECONDS
    )
    return _SMALL if small else group


def summarize(kernels: Sequence[Kernel], steps: int, *, longest_gaps: int = 12) -> Summary:
    """Everything that is said about a trace of `steps` equal steps. Raises ValueError for an empty one."""
    if not kernels:
        raise ValueError("the trace holds no kernel")
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    busy, gaps, end, last = 0.0, [], ordered[0].start, ordered[0]
    for kernel in ordered:
        finish = kernel.start + kernel.duration
        if kernel.start > end:
            gaps.append(Gap(milliseconds=(kernel.start - end) / 1e3, after=last.name, before=kernel.name))
        if finish > end:
            busy += finish - max(end, kernel.start)
            end, last = finish, kernel
    gaps.sort(key=lambda gap: -gap.milliseconds)
    return Summary(
        steps=steps,
        wall=(end - ordered[0].start) / 1e3 / steps,
        busy=busy / 1e3 / steps,
        groups=_times([(group_of(kernel), kernel.duration) for kernel in ordered], steps),
        kernels=_times([(kernel.name, kernel.duration) for kernel in ordered], steps),
        gaps=tuple(gaps[:longest_gaps]),
    )


def _times(pairs: Iterable[tuple[str, float]], steps: int) -> tuple[GroupTime, ...]:
    """Sums by name, the largest first."""
    sums: dict[str, list[float]] = {}
    for name, duration in pairs:
        row = sums.setdefault(name, [0.0, 0.0])
        row[0] += duration
        row[1] += 1
    rows = [
        GroupTime(name=name, milliseconds=time / 1e3 / steps, count=count / steps)
        for name, (time, count) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.milliseconds, row.name)))


def summary_text(summary: Summary, *, top: int = 40, width: int = 150) -> str:
    """The table for people."""
    lines = [f"{'ms/step':>9} {'share':>6} {'count':>8}  kind (times of kernels that overlap add up)"]
    lines += [_line(row, summary.wall) for row in summary.groups]
    gap = summary.wall - summary.busy
    lines += [
        f"{summary.busy:9.2f} {_share(summary.busy, summary.wall)} {'':8}  busy (union of kernels)",
        f"{gap:9.2f} {_share(gap, summary.wall)} {'':8}  gaps",
        f"{summary.wall:9.2f} {'':6} {'':8}  wall, first kernel to last, under the profiler",
        "",
        f"{'ms/step':>9} {'share':>6} {'count':>8}  the {top} kernels that take longest",
    ]
    lines += [_line(row, summary.wall, width) for row in summary.kernels[:top]]
    lines += ["", "longest gaps (ms each, over all steps): after -> before"]
    for one in summary.gaps:
        lines.append(f"{one.milliseconds:9.3f}  {one.after[: width // 2]} -> {one.before[: width // 2]}")
    return "\n".join(lines)


def _line(row: GroupTime, wall: float, width: int = 150) -> str:
    return f"{row.milliseconds:9.2f} {_share(row.milliseconds, wall)} {row.count:8.1f}  {row.name[:width]}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0.0:5.1f}%"
