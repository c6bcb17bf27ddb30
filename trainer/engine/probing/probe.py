"""Measured kernel verdicts: each candidate forward and backward in its own process, against float32.

A kernel that crashes takes its process with it, which is a verdict. The parent imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainer.engine.probing.child import Answer, Child, Measured, last_words
from trainer.families.values import AttentionShape
from trainer.machine.facts import Facts, KernelVerdict
from trainer.machine.host import parse_meminfo
from trainer.planning.shapes.shape_classes import matmul_shape_class, shape_class
from trainer.ways.kernels import KERNELS, NOT_INSTALLED, Kernel
from trainer.ways.storages import WAYS, Way

TIMEOUT_SECONDS = 60.0
MEMINFO = Path("/proc/meminfo")

_TOLERANCE = 2e-2
"""Largest relative error of output and gradients against float32; bf16 kernels that work stay under 1e-2."""
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b(:|$)")
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that no kernel raises: a user, or the host short of memory, ended the process."""
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|CUBLAS_STATUS_ALLOC_FAILED")
_FILES = re.compile(r"(?:\w*FileNotFound|Permission|OS|BrokenPipe|Connection|Timeout)Error\b|\[Errno \d+\]")
MOST_HELD = 0.1
"""Share of the GPU's memory that others may hold while a kernel runs out of it by its own fault."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """The answers about some kernels."""

    verdicts: tuple[KernelVerdict, ...]
    """Verdicts on the kernels, which are worth keeping."""
    unsettled: tuple[KernelVerdict, ...] = ()
    """Failures that say nothing of the kernel: a full GPU, a killed process, a missing file."""
    held: float = 0.0
    """Largest share of the GPU's memory that other processes held: times beside them mean little."""


def kernels_for(facts: Facts, device: str, dtype: str) -> tuple[str, ...]:
    """Kernels that could run on this machine, kernels of packages that are not installed included."""
    if device != "cuda":
        return ("attention.math",)
    capability = facts.gpu.capability
    attention = [
        name for name, row in attention_kernels().items() if row.only_capability in (None, capability)
    ]
    if dtype != "bf16":
        return tuple(attention)
    return (
        *attention,
        *(name for name, row in matmul_kernels().items() if capability >= row.least_capability),
    )


def attention_kernels() -> dict[str, Kernel]:
    """Every kernel of attention that is measured, by its name in verdicts."""
    return {f"attention.{name}": row for name, row in KERNELS.items() if row.measured}


def matmul_kernels() -> dict[str, Way]:
    """Every way to store and multiply frozen linears that is measured, the more precise first."""
    return {way.verdict: way for way in sorted(WAYS.values(), key=lambda way: way.tier) if way.verdict}


def unmeasured(kernels: Sequence[str], facts: Facts, shape: AttentionShape, dtype: str) -> tuple[str, ...]:
    """The `kernels` that have no verdict at the run's shape and type, or whose package has come or gone
    since.
    """
    known = {(row.kernel, row.shape_class, row.dtype): row.reason != NOT_INSTALLED for row in facts.verdicts}
    return tuple(name for name in kernels if known.get(verdict_key(name, shape, dtype)) != _installed(name))


def verdict_key(kernel: str, shape: AttentionShape, dtype: str) -> tuple[str, str, str]:
    """(kernel, shape class, type) of the verdict on a kernel that a run in `dtype` looks for."""
    if kernel in matmul_kernels():
        return kernel, matmul_shape_class(shape), "bf16"
    return kernel, shape_class(shape), dtype


def probe(
    kernels: Sequence[str],
    shape: AttentionShape,
    dtype: str,
    environment: Mapping[str, str],
    *,
    device: str = "cuda",
) -> Probed:
    """Verdicts of `kernels` at the run's shape; `dtype` is `bf16`, `fp16` or `fp32`. Takes seconds a kernel.

    All of them share TIMEOUT_SECONDS; a kernel that no time is left for gets no verdict.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    present = [name for name in kernels if _installed(name)]
    verdicts = [_failed(name, shape, dtype, NOT_INSTALLED) for name in kernels if name not in present]
    unsettled: list[KernelVerdict] = []
    held = 0.0
    with contextlib.ExitStack() as stack:

        def start() -> Child:
            child = Child(environment)
            stack.callback(child.end)
            return child

        # the next processes import torch while one measures
        ahead = _ahead(len(os.sched_getaffinity(0)))
        waiting = deque(start() for _ in present[:ahead])
        for number, kernel in enumerate(present):
            if number + ahead < len(present):
                waiting.append(start())
            child = waiting.popleft()
            request = {"kernel": kernel, "shape": asdict(shape), "dtype": dtype, "device": device}
            answer = child.ask(request, deadline - time.monotonic())
            # only a kernel that had all of the time has failed by not using it
            if answer.code is None and number > 0:
                break
            settled, verdict = _verdict(kernel, shape, dtype, device, answer)
            (verdicts if settled else unsettled).append(verdict)
            if answer.code is not None:
                held = max(held, _held(answer))
    return Probed(verdicts=tuple(verdicts), unsettled=tuple(unsettled), held=held)


def _ahead(cores: int) -> int:
    """Processes that start before they are asked, on so many cores: imports take a core and longer than most
    measurements, whose times other work on the cores must not change.
    """
    return max(1, min(4, cores // 4))


def is_accident(answer: Answer) -> bool:
    """True for a process that failed for a reason which says nothing of what it measured: it was killed, had
    no memory or lacked a file.
    """
    if answer.code is None or answer.code == 0:
        return False
    said = _OUT_OF_MEMORY.search(answer.errors) or _FILES.search(answer.errors)
    return -answer.code in _FROM_OUTSIDE or said is not None


def _installed(kernel: str) -> bool:
    """True if a kernel's package is installed, found without importing any of it."""
    row = attention_kernels().get(kernel) or matmul_kernels().get(kernel)
    package, _, part = (row.module if row else "").partition(".")
    if not package:
        return True
    spec = importlib.util.find_spec(package)
    if spec is None:
        return False
    if part:
        return any((Path(folder) / part).is_dir() for folder in spec.submodule_search_locations or ())
    return spec.origin is not None  # the folder alone may be there for the sake of another package's part


def _held(answer: Answer) -> float:
    """Share of the GPU's memory that others held; a process tells it once all but its kernel has worked."""
    return float(answer.rows[0]["held"]) if answer.rows else 0.0


def _verdict(
    kernel: str, shape: AttentionShape, dtype: str, device: str, answer: Answer
) -> tuple[bool, KernelVerdict]:
    """A flag, True if the answer is about the kernel itself, and the verdict on it."""
    begun, code = bool(answer.rows), answer.code
    if code is None:
        # any kernel may be slow on cores that others use
        reason, settled = f"no result within {TIMEOUT_SECONDS:.0f} s", begun and device != "cpu"
    elif code == 0:
        return True, judge(kernel, shape, Measured(**answer.rows[-1]), dtype)
    else:
        # CUDA's errors say their reason in the first line, and give advice in the lines after it
        raised = [line for line in answer.errors.splitlines() if code > 0 and _EXCEPTION.match(line)]
        said = last_words("\n".join(raised) or answer.errors) or "no message"
        reason = f"crashed with {signal.Signals(-code).name}: {said}" if code < 0 else f"failed: {said}"
        if not begun:
            settled, reason = False, f"before it began: {reason}"
        elif code < 0:
            settled = -code not in _FROM_OUTSIDE
        elif _OUT_OF_MEMORY.search(reason):
            settled = _held(answer) < MOST_HELD
        else:
            settled = not _FILES.search(reason)
    return settled, _failed(kernel, shape, dtype, reason)


def judge(kernel: str, shape: AttentionShape, measured: Measured, dtype: str = "bf16") -> KernelVerdict:
    """The verdict on a measured kernel: whether it is near enough to float32."""
    way = matmul_kernels().get(kernel)
    allowed = way.tolerance if way else _TOLERANCE
    # a NaN would be lost in max
    bad = [name for name, error in measured.errors.items() if not error < float("inf")]
    if bad:
        return _failed(kernel, shape, dtype, f"not finite: {', '.join(bad)}")
    part, error = max(measured.errors.items(), key=lambda item: item[1])
    reason = f"relative error {error:.1e} against float32 ({part}), allowed {allowed:g}"
    return replace(
        _failed(kernel, shape, dtype, reason),
        works=error <= allowed,
        milliseconds=round(measured.milliseconds, 3),
        relative_error=float(f"{error:.2e}"),
    )


def _failed(kernel: str, shape: AttentionShape, dtype: str, reason: str) -> KernelVerdict:
    _, at, kind = verdict_key(kernel, shape, dtype)
    return KernelVerdict(
        kernel=kernel,
        shape_class=at,
        dtype=kind,
        works=False,
        milliseconds=None,
        relative_error=None,
        reason=reason,
    )


def held_by_others(device: str) -> float:
    """Share of the GPU's memory that is taken before this process takes any; 0 on a CPU."""
    import torch

    if device != "cuda":
        return 0.0
    if torch.cuda.get_device_properties().is_integrated:
        # there CUDA counts the page cache as taken, and a container's limit does not hold for it
        memory = parse_meminfo(MEMINFO.read_text())
        return 1.0 - memory["MemAvailable"] / memory["MemTotal"]
    free, total = torch.cuda.mem_get_info()
    return 1.0 - free / total
