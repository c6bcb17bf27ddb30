"""Floor 6: measured kernel verdicts: each candidate forward and backward in its own process, against float32.

A kernel that crashes takes its process with it, which is a verdict. The parent imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config.interpreter import python
from trainer.families.protocol import AttentionShape
from trainer.hardware.facts import Facts, KernelVerdict

ATTENTION = (
    "attention.cudnn_strided",
    "attention.cudnn",
    "attention.flash",
    "attention.flash_attn_2",
    "attention.flash_attn_3",
    "attention.flash_attn_4",
    "attention.efficient",
    "attention.math",
)
MATMUL = ("matmul.bf16", "matmul.fp8", "matmul.int8", "matmul.nf4")
"""What a frozen linear layer may be stored and multiplied in; `trainer.engine.probe_matmul`."""
TIMEOUT_SECONDS = 60.0
NOT_INSTALLED = "not installed"

_TOLERANCE = 2e-2
# quantised values are off by themselves: 2 %, 1 % and 9 % of a weight, fp8 activations as much again
_TOLERANCES = {"matmul.fp8": 6e-2, "matmul.int8": 3e-2, "matmul.nf4": 1.5e-1}
"""Largest relative error of output and gradients against float32; bf16 kernels that work stay under 1e-2."""
_PACKAGES = {
    "attention.flash_attn_2": "flash_attn",
    "attention.flash_attn_3": "flash_attn_interface",
    "attention.flash_attn_4": "flash_attn.cute",
    "matmul.nf4": "bitsandbytes",
}
_HOPPER, _FP8_CAPABILITY = (9, 0), (8, 9)
_REFERENCE_HEADS = 2
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b(:|$)")
_WARMUP, _REPEATS = 3, 10


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one process measured."""

    milliseconds: float
    """Median of forward plus backward."""
    errors: Mapping[str, float]
    """Relative error against float32 of the output and of each gradient, by name."""


def shape_class(shape: AttentionShape) -> str:
    """Key of an attention verdict: verdicts are measured at the run's own shape."""
    shared = f"/{shape.key_heads}" if _key_heads(shape) < shape.heads else ""
    causal = " causal" if shape.causal else ""
    return f"b{shape.batch_size} h{shape.heads}{shared} d{shape.head_width} n{shape.tokens}{causal}"


def matmul_shape(shape: AttentionShape) -> tuple[int, int, int]:
    """(tokens, out, in) of the run's typical linear layer: the queries, keys and values of its attention."""
    heads = shape.heads + 2 * _key_heads(shape)
    return shape.batch_size * shape.tokens, heads * shape.head_width, shape.heads * shape.head_width


def matmul_shape_class(shape: AttentionShape) -> str:
    """Key of a matmul verdict."""
    tokens, rows, columns = matmul_shape(shape)
    return f"m{tokens} n{rows} k{columns}"


def _key_heads(shape: AttentionShape) -> int:
    return shape.key_heads or shape.heads


def kernels_for(facts: Facts, device: str, dtype: str) -> tuple[str, ...]:
    """Kernels that could run on this machine; those of a missing package are among them."""
    if device != "cuda":
        return ("attention.math",)
    capability = facts.gpus[0].capability
    refused = set() if capability == _HOPPER else {"attention.flash_attn_3"}
    if capability < _FP8_CAPABILITY:
        refused.add("matmul.fp8")
    names = (*ATTENTION, *MATMUL) if dtype == "bf16" else ATTENTION
    return tuple(name for name in names if name not in refused)


def unmeasured(
    kernels: Sequence[str], facts: Facts, shape: AttentionShape, *, failed_too: bool = False
) -> tuple[str, ...]:
    """Those of `kernels` that have no verdict at the run's shape, or whose package has come or gone since.

    With `failed_too` also those that were seen failing.
    """
    known = {
        (row.kernel, row.shape_class): row.reason != NOT_INSTALLED
        for row in facts.verdicts
        if row.works or row.reason == NOT_INSTALLED or not failed_too
    }
    return tuple(name for name in kernels if known.get((name, _class_of(name, shape))) != _installed(name))


def probe(
    kernels: Sequence[str], shape: AttentionShape, dtype: str, environment: Mapping[str, str]
) -> tuple[KernelVerdict, ...]:
    """Verdicts of `kernels` at the run's shape; `dtype` is `bf16` or `fp32`. Takes seconds a kernel.

    All of them share TIMEOUT_SECONDS; a kernel that no time is left for gets no verdict.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    verdicts = [_failed(name, shape, NOT_INSTALLED) for name in kernels if not _installed(name)]
    present = [name for name in kernels if _installed(name)]
    with contextlib.ExitStack() as stack:
        following = _start(environment, stack) if present else None
        for number, kernel in enumerate(present):
            assert following is not None
            process = following
            # the next process imports torch while this one measures
            following = _start(environment, stack) if number + 1 < len(present) else None
            verdict = _ask(process, kernel, shape, dtype, deadline - time.monotonic())
            # only a kernel that had all of the time has failed by not using it
            if verdict is None and number == 0:
                verdict = _failed(kernel, shape, f"no result within {TIMEOUT_SECONDS:.0f} s")
            if verdict is None:
                break
            verdicts.append(verdict)
    return tuple(verdicts)


def _installed(kernel: str) -> bool:
    """Whether a kernel's package is there, found without importing any of it."""
    package, _, part = _PACKAGES.get(kernel, "").partition(".")
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
        python("-m", "trainer.engine.probe"),
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


def _ask(
    process: subprocess.Popen[str], kernel: str, shape: AttentionShape, dtype: str, seconds: float
) -> KernelVerdict | None:
    """The verdict on one kernel; None where `seconds` did not suffice."""
    request = json.dumps({"kernel": kernel, "dtype": dtype, "shape": asdict(shape)})
    try:
        output, errors = process.communicate(request, timeout=max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return None
    if process.returncode != 0:
        return _failed(kernel, shape, _death(process.returncode, errors))
    measured = Measured(**json.loads(output.splitlines()[-1]))
    return judge(kernel, shape, measured)


def judge(kernel: str, shape: AttentionShape, measured: Measured) -> KernelVerdict:
    """Whether what was measured is near enough to float32."""
    allowed = _TOLERANCES.get(kernel, _TOLERANCE)
    # a NaN would be lost in max
    bad = [name for name, error in measured.errors.items() if not error < float("inf")]
    if bad:
        return _failed(kernel, shape, f"not finite: {', '.join(bad)}")
    part, error = max(measured.errors.items(), key=lambda item: item[1])
    return KernelVerdict(
        kernel=kernel,
        shape_class=_class_of(kernel, shape),
        works=error <= allowed,
        milliseconds=round(measured.milliseconds, 3),
        relative_error=float(f"{error:.2e}"),
        reason=f"relative error {error:.1e} against float32 ({part}), allowed {allowed:g}",
    )


def _class_of(kernel: str, shape: AttentionShape) -> str:
    return matmul_shape_class(shape) if kernel in MATMUL else shape_class(shape)


def _failed(kernel: str, shape: AttentionShape, reason: str) -> KernelVerdict:
    return KernelVerdict(
        kernel=kernel,
        shape_class=_class_of(kernel, shape),
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


def measure_attention(kernel: str, dtype: str, shape: AttentionShape) -> Measured:
    """One attention call of the run, by the plan's name of a kernel.

    Tensors are laid out as diffusers lays them out: (B, tokens, heads, width) contiguous, output flattened.
    """
    import torch

    from trainer.modeling.attention import attention

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    size, groups = (shape.batch_size, shape.tokens), shape.heads // _key_heads(shape)
    inputs = [
        torch.randn((*size, heads, shape.head_width), device=device, dtype=kind, requires_grad=True)
        for heads in (shape.heads, _key_heads(shape), _key_heads(shape))
    ]
    upstream = torch.randn((*size, shape.heads * shape.head_width), device=device, dtype=kind)

    def forward(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        query, key, value = tensors
        return attention(query, key, value, name, causal=shape.causal).flatten(2, 3)

    def once() -> list[torch.Tensor]:
        output = forward(inputs, kernel)
        return [output, *torch.autograd.grad(output, inputs, upstream)]

    # the first heads of keys, and those of queries that read them
    keys = min(_REFERENCE_HEADS, _key_heads(shape))
    heads = (keys * groups, keys, keys)
    columns = heads[0] * shape.head_width
    exact = [
        tensor.detach()[:, :, :count].float().requires_grad_()
        for tensor, count in zip(inputs, heads, strict=True)
    ]
    wanted = forward(exact, "math")
    gradients = torch.autograd.grad(wanted, exact, upstream[..., :columns].float())
    output, *found = once()
    errors = {"output": relative_error(output[..., :columns], wanted)}
    for name, one, other in zip(("query", "key", "value"), found, gradients, strict=True):
        errors[f"gradient of the {name}"] = relative_error(one[:, :, : other.shape[2]], other)
    if f"attention.{kernel}" in _PACKAGES:
        # torch's own kernels compile into one graph; of a package only the installed release can tell
        compiled: Callable[..., torch.Tensor] = torch.compile(forward, fullgraph=True, backend="aot_eager")
        torch.autograd.grad(compiled(inputs, kernel), inputs, upstream)
    return Measured(milliseconds=median_milliseconds(once, device), errors=errors)


def relative_error(found: Any, wanted: Any) -> float:
    """Norm of the difference over that of `wanted`, two tensors."""
    return float(((found.float() - wanted).norm() / wanted.norm()).item())


def median_milliseconds(work: Callable[[], object], device: str) -> float:
    """Of `work` after a warm-up: the GPU's own clock on `cuda`, the host's on `cpu`."""
    import statistics

    import torch

    for _ in range(_WARMUP):
        work()
    if device == "cpu":
        clocks = [time.perf_counter()]
        for _ in range(_REPEATS):
            work()
            clocks.append(time.perf_counter())
        return 1000 * statistics.median(after - before for before, after in itertools.pairwise(clocks))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(events))


def _main() -> None:
    from trainer.engine.probe_matmul import measure_matmul  # with it torch, before the request comes

    line = sys.stdin.readline()
    if not line:
        return
    asked = json.loads(line)
    kind, _, name = asked["kernel"].partition(".")
    shape = AttentionShape(**asked["shape"])
    if kind == "attention":
        measured = measure_attention(name, asked["dtype"], shape)
    else:
        measured = measure_matmul(name, *matmul_shape(shape))
    print(json.dumps({"milliseconds": measured.milliseconds, "errors": dict(measured.errors)}))


if __name__ == "__main__":
    _main()
