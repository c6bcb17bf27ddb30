"""Time and error of attention by its kernel, forward and backward, against float32.

Runs in the process of one measurement.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from trainer.engine.probing.child import Measured
from trainer.families.values import AttentionShape
from trainer.modeling.attention import packed_rows
from trainer.modeling.attention.kernels import attention
from trainer.planning.shapes.shape_classes import key_heads

_REFERENCE_HEADS = 2
_WARMUP, _REPEATS = 3, 10
# rows that differ, and how much longer a sample of one may be than another
_DIVISIONS, _LONGEST = 1 + _WARMUP + _REPEATS, 4000.0


def measure_attention(
    kernel: str,
    dtype: str,
    shape: AttentionShape,
    device: str,
    begin: Callable[[], None],
    *,
    packaged: bool,
) -> Measured:
    """One attention call of the run, by the plan's name of a kernel; `begin` is called just before it.

    `packaged`: it is none of torch's own, so whether it compiles is measured too. Tensors are contiguous (B,
    tokens, heads, width), as diffusers has them. A row of several samples is divided anew in each call.
    """
    inputs, upstream = _tensors(dtype, shape, device)
    rows = deque(_divided(shape.tokens, shape.samples, seed) for seed in range(_DIVISIONS))

    def forward(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        return _attended(tensors, name, shape, rows[0], device)

    def once() -> list[torch.Tensor]:
        output = forward(inputs, kernel)
        return [output, *torch.autograd.grad(output, inputs, upstream)]

    def next_row() -> None:
        rows.rotate()
        once()

    # the first heads of keys, and the heads of queries that read them
    keys = min(_REFERENCE_HEADS, key_heads(shape))
    heads = (keys * (shape.heads // key_heads(shape)), keys, keys)
    columns = heads[0] * shape.head_width
    exact = [
        tensor.detach()[:, :, :count].float().requires_grad_()
        for tensor, count in zip(inputs, heads, strict=True)
    ]
    wanted = forward(exact, "math")
    gradients = torch.autograd.grad(wanted, exact, upstream[..., :columns].float())
    begin()
    output, *found = once()
    errors = {"output": relative_error(output[..., :columns], wanted)}
    for name, one, other in zip(("query", "key", "value"), found, gradients, strict=True):
        errors[f"gradient of the {name}"] = relative_error(one[:, :, : other.shape[2]], other)
    if packaged:
        # torch's own kernels compile into one graph; of a package only the installed release can tell
        compiled: Callable[..., torch.Tensor] = torch.compile(forward, fullgraph=True, backend="aot_eager")
        torch.autograd.grad(compiled(inputs, kernel), inputs, upstream)
    return Measured(milliseconds=median_milliseconds(next_row, device), errors=errors)


def _attended(
    tensors: Sequence[torch.Tensor], kernel: str, shape: AttentionShape, lengths: Sequence[int], device: str
) -> torch.Tensor:
    """The flattened attention output; `lengths` are the lengths of a row's samples."""
    query, key, value = tensors
    if not shape.causal:
        return attention(query, key, value, kernel).flatten(2, 3)
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
    segments = packed_rows.segments_for(kernel, lengths, device)
    return packed_rows.packed_attention(query, key, value, kernel, segments=segments).flatten(2, 3)


def _tensors(dtype: str, shape: AttentionShape, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value (B, tokens, heads, width), and the gradient of the flattened output."""
    torch.manual_seed(0)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    size = (shape.batch_size, shape.tokens)
    inputs = [
        torch.randn((*size, heads, shape.head_width), device=device, dtype=kind, requires_grad=True)
        for heads in (shape.heads, key_heads(shape), key_heads(shape))
    ]
    return inputs, torch.randn((*size, shape.heads * shape.head_width), device=device, dtype=kind)


def _divided(tokens: int, samples: int, seed: int) -> list[int]:
    """Lengths of the samples in a row, as many short as long by their logarithm."""
    draw = random.Random(seed)
    shares = [_LONGEST ** draw.random() for _ in range(samples)]
    ends = [round(end / sum(shares) * (tokens - samples)) for end in itertools.accumulate(shares)]
    return [1 + after - before for before, after in itertools.pairwise([0, *ends])]


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over that of `wanted`."""
    return float(((found.float() - wanted).norm() / wanted.norm()).item())


def median_milliseconds(work: Callable[[], object], device: str) -> float:
    """Median time of `work` after a warm-up, by the GPU's clock on `cuda` and by the host's on `cpu`."""
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
