"""Measured kernel verdicts: each candidate forward and backward in its own process, against float32.

A kernel that crashes takes its process with it, which is a verdict. The parent imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config.interpreter import python
from trainer.engine.probing.attention import Measured, measure_attention
from trainer.families.values import AttentionShape
from trainer.machine.facts import Facts, KernelVerdict
from trainer.machine.host import parse_meminfo
from trainer.planning.shapes.shape_classes import matmul_shape, matmul_shape_class, shape_class
from trainer.ways.kernels import KERNELS, NOT_INSTALLED, Kernel
from trainer.ways.storages import WAYS, Way

TIMEOUT_SECONDS = 60.0
MEMINFO = Path("/proc/meminfo")

_TOLERANCE = 2e-2
"""Largest relative error of output and gradients against float32; bf16 kernels that work stay under 1e-2."""
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b(:|$)")
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that no kernel raises: somebody, or the host short of memory, ended the process."""
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|CUBLAS_STATUS_ALLOC_FAILED")
_FILES = re.compile(r"(?:\w*FileNotFound|Permission|OS|BrokenPipe|Connection|Timeout)Error\b|\[Errno \d+\]")
MOST_HELD = 0.1
"""Share of the GPU's memory that others may hold while a kernel runs out of it by its own fault."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What came of asking for some kernels."""

    verdicts: tuple[KernelVerdict, ...]
    """About the kernels: these are worth keeping."""
    unsettled: tuple[KernelVerdict, ...] = ()
    """Failures that say nothing of the kernel: a full GPU, a killed process, a missing file."""
    held: float = 0.0
    """Largest share of the GPU's memory that other processes held: times beside them mean little."""


def kernels_for(facts: Facts, device: str, dtype: str) -> tuple[str, ...]:
    """Kernels that could run on this machine; those of a missing package are among them."""
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
    """Those of `kernels` that have no verdict at the run's shape and type, or whose package has come or gone
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
    asked = [_Request(kernel=name, shape=shape, dtype=dtype, device=device) for name in kernels]
    verdicts = [one.failed(NOT_INSTALLED) for one in asked if not _installed(one.kernel)]
    present = [one for one in asked if _installed(one.kernel)]
    unsettled: list[KernelVerdict] = []
    held = 0.0
    with contextlib.ExitStack() as stack:
        following = _start(environment, stack) if present else None
        for number, request in enumerate(present):
            assert following is not None
            process = following
            # the next process imports torch while this one measures
            following = _start(environment, stack) if number + 1 < len(present) else None
            answer = _ask(process, request, deadline - time.monotonic())
            # only a kernel that had all of the time has failed by not using it
            if answer.verdict is None and number > 0:
                break
            verdict = answer.verdict or request.failed(f"no result within {TIMEOUT_SECONDS:.0f} s")
            (verdicts if answer.settled else unsettled).append(verdict)
            held = max(held, answer.held)
    return Probed(verdicts=tuple(verdicts), unsettled=tuple(unsettled), held=held)


def _installed(kernel: str) -> bool:
    """Whether a kernel's package is there, found without importing any of it."""
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


def _start(environment: Mapping[str, str], stack: contextlib.ExitStack) -> subprocess.Popen[str]:
    """A process that waits for a request, ended with `stack`."""
    process = subprocess.Popen(
        python("-m", "trainer.engine.probing.probe"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(environment),
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()  # nothing where it has ended already
    process.communicate()


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What one process is asked for."""

    kernel: str
    shape: AttentionShape
    dtype: str
    device: str

    def failed(self, reason: str) -> KernelVerdict:
        """The verdict on a kernel that gave no result."""
        return _failed(self.kernel, self.shape, self.dtype, reason)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What one process said."""

    verdict: KernelVerdict | None
    """None where the time did not suffice."""
    settled: bool
    """Whether it is about the kernel."""
    held: float = 0.0


def _ask(process: subprocess.Popen[str], request: _Request, seconds: float) -> _Answer:
    """The answer of one process within `seconds`."""
    try:
        output, errors = process.communicate(json.dumps(asdict(request)), timeout=max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        # any kernel may be slow on cores that others use
        return _Answer(verdict=None, settled="{" in output and request.device != "cpu")
    # the first says that everything but the kernel worked; what libraries print is none of ours
    begun, *rest = [json.loads(line) for line in output.splitlines() if line.startswith("{")] or [None]
    held = float(begun["held"]) if begun else 0.0
    if process.returncode == 0:
        measured = Measured(**rest[-1])
        verdict = judge(request.kernel, request.shape, measured, request.dtype)
        return _Answer(verdict=verdict, settled=True, held=held)
    reason = _death(process.returncode, errors)
    if not begun:
        reason = f"before it began: {reason}"
    settled = bool(begun) and _about_the_kernel(process.returncode, reason, held)
    return _Answer(verdict=request.failed(reason), settled=settled, held=held)


def _about_the_kernel(code: int, reason: str, held: float) -> bool:
    """Whether the end of a process tells of its kernel; `held` is others' share of the GPU's memory."""
    if code < 0:
        return -code not in _FROM_OUTSIDE
    if _OUT_OF_MEMORY.search(reason):
        return held < MOST_HELD
    return not _FILES.search(reason)


def judge(kernel: str, shape: AttentionShape, measured: Measured, dtype: str = "bf16") -> KernelVerdict:
    """Whether what was measured is near enough to float32."""
    way = matmul_kernels().get(kernel)
    allowed = way.tolerance if way else _TOLERANCE
    # a NaN would be lost in max
    bad = [name for name, error in measured.errors.items() if not error < float("inf")]
    if bad:
        return _failed(kernel, shape, dtype, f"not finite: {', '.join(bad)}")
    part, error = max(measured.errors.items(), key=lambda item: item[1])
    _, at, kind = verdict_key(kernel, shape, dtype)
    return KernelVerdict(
        kernel=kernel,
        shape_class=at,
        dtype=kind,
        works=error <= allowed,
        milliseconds=round(measured.milliseconds, 3),
        relative_error=float(f"{error:.2e}"),
        reason=f"relative error {error:.1e} against float32 ({part}), allowed {allowed:g}",
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


def _death(code: int, stderr: str) -> str:
    """How the process ended, with the exception it raised, else the last line it wrote."""
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    # what CUDA's errors say stands in their first line, advice in those after it
    raised = [line for line in lines if code > 0 and _EXCEPTION.match(line)]
    last = (raised or lines or ["no message"])[-1].strip()[:200]
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}: {last}"
    return f"failed: {last}"


# from here on, in the process of one kernel


def held_by_others(device: str) -> float:
    """Share of the GPU's memory that is taken before this process takes any; 0 on a CPU."""
    import torch

    if device != "cuda":
        return 0.0
    if torch.cuda.get_device_properties(0).is_integrated:
        # there CUDA counts the page cache as taken, and a container's limit does not hold for it
        memory = parse_meminfo(MEMINFO.read_text())
        return 1.0 - memory["MemAvailable"] / memory["MemTotal"]
    free, total = torch.cuda.mem_get_info()
    return 1.0 - free / total


def _main() -> None:
    import torch

    from trainer.engine.probing.matmul import measure_matmul

    line = sys.stdin.readline()  # after the imports: they take longer than the process before
    if not line:
        return
    asked = json.loads(line)
    kind, _, name = asked["kernel"].partition(".")
    shape, device = AttentionShape(**asked["shape"]), asked["device"]
    held = held_by_others(device)

    def begin() -> None:
        if device == "cuda":
            torch.cuda.synchronize()  # what was launched before must not fail in the kernel's name
        print(json.dumps({"held": held}), flush=True)

    if kind == "attention":
        packaged = bool(KERNELS[name].package)
        measured = measure_attention(name, asked["dtype"], shape, device, begin, packaged=packaged)
    else:
        measured = measure_matmul(name, *matmul_shape(shape), device, begin)
    print(json.dumps({"milliseconds": measured.milliseconds, "errors": dict(measured.errors)}))


if __name__ == "__main__":
    _main()
