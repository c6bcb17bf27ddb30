"""Time and error of a frozen linear layer by how it is stored: forward, and the gradient of its input.

Runs in the process of one measurement.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.engine.probing.attention import median_milliseconds, relative_error
from trainer.engine.probing.child import Measured
from trainer.ways.storages import WAYS

Linear = Callable[[torch.Tensor], torch.Tensor]
_REFERENCE_ROWS = 1024


def measure_matmul(
    kernel: str, tokens: int, rows: int, columns: int, device: str, begin: Callable[[], None]
) -> Measured:
    """(tokens, columns) through a weight (rows, columns) stored in `kernel`, a word of `features.weights`.

    `begin` is called just before the weight is stored so. Milliseconds include quantising what comes in, and
    unpacking the weight.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16
    weight = torch.randn((rows, columns), device=device, dtype=dtype) / columns**0.5
    inputs = torch.randn((tokens, columns), device=device, dtype=dtype)
    upstream = torch.randn((tokens, rows), device=device, dtype=dtype)
    begin()
    linear = _linear(kernel, weight)

    def once() -> tuple[torch.Tensor, ...]:
        # a leaf of its own: autograd waits for the stream that first used one, which a capture must not
        leaf = inputs.detach().requires_grad_()
        output = linear(leaf)
        (gradient,) = torch.autograd.grad(output, leaf, upstream)
        return output.detach(), gradient

    output, gradient = once()
    # rows do not depend on each other
    part = slice(min(tokens, _REFERENCE_ROWS))
    exact = weight.float()
    errors = {
        "output": relative_error(output[part], inputs[part].float() @ exact.t()),
        "gradient of the input": relative_error(gradient[part], upstream[part].float() @ exact),
    }
    # a run replays its steps as graphs
    timed = _captured(once) if device == "cuda" else once
    return Measured(milliseconds=median_milliseconds(timed, device), errors=errors)


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    """`work` as one CUDA graph: its kernels without the time that the host takes to launch them."""
    stream = torch.cuda.Stream()
    with torch.autograd.set_multithreading_enabled(False):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
    return graph.replay


def _linear(kernel: str, weight: torch.Tensor) -> Linear:
    """The product with `weight` as the run computes it."""
    if kernel == "bf16":
        return lambda inputs: torch.nn.functional.linear(inputs, weight)
    from trainer.modeling.storage.layers import replacer
    from trainer.modeling.vision import make_torchvision_importable

    make_torchvision_importable()  # the libraries that store int8 and nf4 import transformers
    # with the copy for backward where the storage has one
    way = next(way for way in WAYS.values() if way.verdict == f"matmul.{kernel}")
    rows, columns = weight.shape
    replace = replacer(way, ())
    assert replace is not None, f"{kernel} is no storage of frozen weights"
    stored = replace("linear", torch.nn.Linear(columns, rows, bias=False, device="meta"))
    assert stored is not None
    stored.quantize(weight)
    # bitsandbytes and FP8 have kernels of their own; int8 values are unpacked by one that the compiler makes
    return stored if way.compute or len({*way.unpack_traffic}) == 1 else _compiled(stored, weight)


def _compiled(linear: Linear, weight: torch.Tensor) -> Linear:
    """Unpacking is pointwise work of several steps, one in a compiled block; on a CPU it stays as it is."""
    if weight.device.type == "cpu":
        return linear
    from torch._inductor import config

    # a handful of small kernels is not worth a pool of processes that has to start first
    config.compile_threads = 1
    compiled: Linear = torch.compile(linear)
    return compiled
