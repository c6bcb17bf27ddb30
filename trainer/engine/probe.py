"""Floor 6: measured kernel verdicts: each candidate forward and backward in its own process, against float32.

A kernel that crashes takes its process with it, which is a verdict. The parent imports no torch.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from trainer.families.protocol import AttentionShape
from trainer.hardware.facts import KernelVerdict

CANDIDATES = ("cudnn", "flash", "efficient", "math")
TIMEOUT_SECONDS = 60.0
TOLERANCE = 2e-2
"""Largest relative error of output and gradients against float32; bf16 kernels that work stay under 1e-2."""
_REFERENCE_HEADS = 2
_WARMUP, _REPEATS = 3, 10


def shape_class(shape: AttentionShape) -> str:
    """Key of a verdict: verdicts are measured at the run's own shape."""
    return f"b{shape.batch_size} h{shape.heads} d{shape.head_width} n{shape.tokens}"


def probe_attention(
    shape: AttentionShape, dtype: str, candidates: Sequence[str], environment: Mapping[str, str]
) -> tuple[KernelVerdict, ...]:
    """Verdicts of `candidates` at one shape; `dtype` is `bf16` or `fp32`. Takes seconds a kernel.

    All of them share TIMEOUT_SECONDS; a kernel that no time is left for gets no verdict.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    verdicts: list[KernelVerdict] = []
    for kernel in candidates:
        verdict = _probe_one(kernel, shape, dtype, environment, deadline - time.monotonic())
        # only a kernel that had all of the time has failed by not using it
        if verdict is None and not verdicts:
            verdict = _verdict(kernel, shape, reason=f"no result within {TIMEOUT_SECONDS:.0f} s")
        if verdict is None:
            break
        verdicts.append(verdict)
    return tuple(verdicts)


def _probe_one(
    kernel: str, shape: AttentionShape, dtype: str, environment: Mapping[str, str], seconds: float
) -> KernelVerdict | None:
    """The verdict on one kernel; None where `seconds` did not suffice."""
    request = json.dumps({"kernel": kernel, "dtype": dtype, "shape": asdict(shape)})
    command = [sys.executable, "-m", "trainer.engine.probe", request]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=max(seconds, 0.0),
            env=dict(environment),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return _verdict(kernel, shape, reason=_death(done.returncode, done.stderr))
    measured = json.loads(done.stdout.splitlines()[-1])
    works = measured["error"] <= TOLERANCE
    reason = f"relative error {measured['error']:.1e} against float32, allowed {TOLERANCE:.0e}"
    return KernelVerdict(
        kernel=f"attention.{kernel}",
        shape_class=shape_class(shape),
        works=works,
        milliseconds=round(measured["milliseconds"], 3),
        relative_error=float(f"{measured['error']:.2e}"),
        reason=reason,
    )


def _verdict(kernel: str, shape: AttentionShape, *, reason: str) -> KernelVerdict:
    return KernelVerdict(
        kernel=f"attention.{kernel}",
        shape_class=shape_class(shape),
        works=False,
        milliseconds=None,
        relative_error=None,
        reason=reason,
    )


def _death(code: int, stderr: str) -> str:
    """How the process ended, with the last line it wrote."""
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    last = lines[-1].strip()[:200] if lines else "no message"
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}: {last}"
    return f"failed: {last}"


def measure(kernel: str, dtype: str, shape: AttentionShape) -> dict[str, float]:
    """Median milliseconds of forward plus backward on the GPU and the largest relative error.

    Tensors are laid out as diffusers lays them out: (B, tokens, heads, width) contiguous, output flattened.
    """
    import math

    import torch

    from trainer.modeling.attention import attention

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    size = (shape.batch_size, shape.tokens, shape.heads, shape.head_width)
    inputs = [torch.randn(size, device=device, dtype=kind, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(size[0], size[1], size[2] * size[3], device=device, dtype=kind)

    def once(tensors: Sequence[torch.Tensor], name: str, gradient: torch.Tensor) -> list[torch.Tensor]:
        query, key, value = tensors
        output = attention(query, key, value, name, contiguous=name == "cudnn").flatten(2, 3)
        return [output, *torch.autograd.grad(output, tensors, gradient)]

    results = once(inputs, kernel, upstream)
    heads = min(_REFERENCE_HEADS, shape.heads)
    exact = [tensor.detach()[:, :, :heads].float().requires_grad_() for tensor in inputs]
    reference = once(exact, "math", upstream[..., : heads * shape.head_width].float())
    worst = 0.0
    for got, want in zip(results, reference, strict=True):
        part = got[..., : heads * shape.head_width] if got.ndim == 3 else got[:, :, :heads]
        error = float(((part.float() - want).norm() / want.norm()).item())
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return {"error": worst, "milliseconds": _time(lambda: once(inputs, kernel, upstream), device)}


def _time(work: object, device: str) -> float:
    """Median milliseconds of a callable."""
    import statistics

    import torch

    assert callable(work)
    times = []
    for number in range(_WARMUP + _REPEATS):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= _WARMUP:
            times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times)


def _main(request: str) -> None:
    asked = json.loads(request)
    print(json.dumps(measure(asked["kernel"], asked["dtype"], AttentionShape(**asked["shape"]))))


if __name__ == "__main__":
    _main(sys.argv[1])
