"""`bench trained`: what trained weights cost, the optimizer's step and the products of a layer.

    python -m bench trained --record docs/benchmarks/NAME.json
    python -m bench trained --parts optimizer --values 2000000000

`optimizer`: a step over bf16 weights, clipping included, with compensated sums (optimi's AdamW, which full
fine-tunes had before) and with split masters.
`products`: forward and backward of one layer, the gradient of its weight included, in bf16 and in FP8, alone
and compiled. `quantising`: passes that make the bytes of these products alone, beside a copy of the gradient;
GB/s count each byte that a pass has to read or write, the gradient's twice where it is read twice. Ways
alternate, `--rounds` times. On a CPU it runs too, to try it: there FP8 is emulated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import arguments as types
from bench.processes import GIB
from bench.record import update_table
from trainer.config.schema import TrainSection
from trainer.engine.optimizing.updater import Updater
from trainer.errors import HardwareError
from trainer.machine import description
from trainer.modeling.storage.fp8_gradient import quantize_gradient
from trainer.modeling.storage.fp8_product import (
    keep_ones,
    quantize_rows,
    transpose_bytes,
    unpack_rows,
)
from trainer.modeling.storage.fp8_trained import Fp8TrainedLinear, refresh_weights
from trainer.planning.choose.optimizers import SPLIT
from trainer.words import extras

KAHAN = "adamw_kahan_bf16"
COLUMNS = ("part", "what", "way", "ms", "fastest to slowest", "GiB held", "of the first way", "GB/s")
_TENSORS = 16
_WARM_UP = 3
_CALLS = 20
"""Calls of a kernel that are timed together: one alone takes less than its launch."""
_LAYERS: Mapping[str, tuple[int, int, int]] = {
    "gate and up of Llama-8B": (28672, 4096, 4096),
    "q, k and v of Llama-8B": (6144, 4096, 4096),
    "feed-forward of FLUX.1-dev": (12288, 3072, 4608),
}
"""Outputs, inputs and tokens."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line of JSON a way, and write the record."""
    options = parser().parse_args(arguments)
    if "optimizer" in options.parts and importlib.util.find_spec("optimi") is None:
        raise HardwareError(
            "torch-optimi, whose AdamW ours is compared with, is not installed",
            where="bench/trained.py",
            remedy=f"in a checkout: {extras.command('dev')}; or leave the part `optimizer` out",
        )
    rows = [row for part in options.parts for row in PARTS[part](options)]
    for row in rows:
        print(json.dumps(row))
    if options.record:
        update_table(
            options.record,
            [tuple(str(row.get(name, "")) for name in COLUMNS) for row in rows],
            keys=3,
            title="Trained weights: the optimizer's step, and the products of a layer with their quantising",
            where=description.describe(options.month),
            command="python -m bench trained --record FILE",
            columns=COLUMNS,
        )
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    one = types.command_parser("trained", __doc__)
    parts = types.names_of("part", PARTS)
    one.add_argument("--parts", type=parts, default=tuple(PARTS), metavar="NAME,NAME")
    one.add_argument("--values", type=types.positive, default=2**30, help="weights that are updated")
    one.add_argument("--shrink", type=types.positive, default=1, help="divides the layers' sides and tokens")
    one.add_argument("--steps", type=types.positive, default=10, help="of each way in a round")
    one.add_argument("--rounds", type=types.positive, default=2)
    one.add_argument("--record", type=Path, help="docs/benchmarks/NAME.json, whose other rows stay")
    types.add_common(one, "--month")
    return one


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def optimizer(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A step of each optimizer over as many weights."""
    shape = (_TENSORS, max(1, options.values // _TENSORS))
    gradients = [torch.randn(shape[1], device=_device()).mul_(1e-3).bfloat16() for _ in range(_TENSORS)]

    def made(kind: str) -> Callable[[], float]:
        held = {
            str(number): torch.nn.Parameter(torch.full_like(one, 0.02))
            for number, one in enumerate(gradients)
        }
        updater, loss = Updater(held, TrainSection(), SPLIT), torch.zeros((), device=_device())
        if kind == KAHAN:
            updater.optimizer = _compensated(list(held.values()))

        def step() -> float:
            for parameter, gradient in zip(held.values(), gradients, strict=True):
                parameter.grad = gradient.clone()  # clipping is in place
            _synchronize()
            began = time.perf_counter()
            updater.accumulate()
            updater.step(1e-5, loss)
            _synchronize()
            return time.perf_counter() - began

        return step

    what = f"{shape[0] * shape[1] / 1e9:.2f} billion weights"
    return _measured("optimizer", what, {KAHAN: made, SPLIT: made}, options)


def _compensated(values: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """optimi's AdamW over bf16 weights; the updater reads the flag of a bad step on the host before it."""
    from optimi import AdamW

    # of values in bf16, which hold no slower decay; foreach would hold copies of all tensors at once
    settings: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.99), "weight_decay": 0.0, "eps": 1e-8}
    return AdamW(values, kahan_sum=True, triton=_device() == "cuda", foreach=False, **settings)


def products(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Forward and backward of each layer, the weight's bytes made once a pass as in a step of one."""
    keep_ones(_device())
    rows: list[dict[str, Any]] = []
    for what, sizes in _LAYERS.items():
        out, inner, tokens = (max(16, size // options.shrink) for size in sizes)
        inputs = torch.randn(tokens, inner, device=_device(), dtype=torch.bfloat16)
        gradient = torch.randn(tokens, out, device=_device(), dtype=torch.bfloat16).mul_(1e-4)

        def made(
            way: str,
            out: int = out,
            inner: int = inner,
            inputs: torch.Tensor = inputs,
            gradient: torch.Tensor = gradient,
        ) -> Callable[[], float]:
            layer: torch.nn.Linear = torch.nn.Linear(inner, out, bias=False, dtype=torch.bfloat16)
            layer.to(_device())
            if way.startswith("fp8"):
                kind = "bf16" if "bf16" in way else "fp8"
                layer = Fp8TrainedLinear(layer, weight_gradient=kind)  # type: ignore[arg-type]
            refresh_weights(layer)
            call = torch.compile(layer, dynamic=False) if way.endswith("compiled") else layer
            given = inputs.clone().requires_grad_()

            def step() -> float:
                given.grad = layer.weight.grad = None
                _synchronize()
                began = time.perf_counter()
                refresh_weights(layer)
                call(given).backward(gradient)
                _synchronize()
                return time.perf_counter() - began

            return step

        ways = ("bf16", "fp8", "fp8, gradient of the weight in bf16", "bf16, compiled", "fp8, compiled")
        named = f"{what}, {out} x {inner}, {tokens} tokens"
        rows += _measured("products", named, dict.fromkeys(ways, made), options)
    return rows


def quantising(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each pass of a trained layer that makes bytes, on its gradient, kept inputs and weight."""
    rows: list[dict[str, Any]] = []
    for what, sizes in _LAYERS.items():
        out, inner, tokens = (max(16, size // options.shrink) for size in sizes)
        kernels = _kernels(out, inner, tokens)

        def made(way: str, kernels: Mapping[str, Any] = kernels) -> Callable[[], float]:
            call = kernels[way][0]

            def step() -> float:
                _synchronize()
                began = time.perf_counter()
                for _ in range(_CALLS):
                    call()
                _synchronize()
                return (time.perf_counter() - began) / _CALLS

            return step

        named = f"{what}, {out} x {inner}, {tokens} tokens"
        for row in _measured("quantising", named, dict.fromkeys(kernels, made), options):
            rows.append(row | {"GB/s": f"{kernels[row['way']][1] / 1e6 / float(row['ms']):.0f}"})
    return rows


def _kernels(out: int, inner: int, tokens: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Calls by their names, each with the bytes that pass through memory."""
    device = _device()
    gradient = torch.randn(tokens, out, device=device, dtype=torch.bfloat16).mul_(1e-4)
    other = torch.empty_like(gradient)
    kept, row_scale = quantize_rows(torch.randn(tokens, inner, device=device, dtype=torch.bfloat16), pad=True)
    across = torch.rand(out, device=device) + 0.5
    layer = Fp8TrainedLinear(torch.nn.Linear(inner, out, bias=False, dtype=torch.bfloat16).to(device))
    of_gradient, of_inputs, of_weight = tokens * out, len(kept) * inner, out * inner

    def both(column_scale: torch.Tensor | None, with_sums: bool) -> Callable[[], object]:
        return lambda: quantize_gradient(gradient, column_scale, row_scale, with_sums=with_sums)

    return {
        "copy of the gradient": (lambda: other.copy_(gradient), 4 * of_gradient),
        "gradient both ways": (both(across, False), 6 * of_gradient),
        "gradient both ways, and its sum": (both(across, True), 6 * of_gradient),
        "gradient by columns": (both(None, False), 5 * of_gradient),
        "gradient by rows": (lambda: quantize_rows(gradient, across, pad=True), 3 * of_gradient),
        "kept inputs transposed": (lambda: transpose_bytes(kept), 2 * of_inputs),
        "kept inputs in bf16": (lambda: unpack_rows(kept, row_scale, torch.bfloat16), 3 * of_inputs),
        "refresh of the weight": (layer.refresh, 5 * of_weight),
    }


PARTS: Mapping[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "optimizer": optimizer,
    "products": products,
    "quantising": quantising,
}


def _measured(
    part: str,
    what: str,
    ways: Mapping[str, Callable[[str], Callable[[], float]]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A row of each way, from rounds in which they alternate; each is made anew in a round."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    held: dict[str, float] = {}
    for _ in range(options.rounds):
        for way, made in ways.items():
            before = _held(reset=True)
            step = made(way)
            for number in range(_WARM_UP + options.steps):
                seconds = step()
                if number >= _WARM_UP:
                    times[way].append(1e3 * seconds)
            held[way] = _held() - before
            del step
    first = statistics.median(next(iter(times.values())))
    return [
        {
            "part": part,
            "what": what,
            "way": way,
            "ms": f"{statistics.median(one):.3f}",
            "fastest to slowest": f"{min(one):.3f} to {max(one):.3f}",
            "GiB held": f"{held[way]:.2f}",
            "of the first way": f"{statistics.median(one) / first:.2f}",
        }
        for way, one in times.items()
    ]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _held(*, reset: bool = False) -> float:
    """Peak GiB of the device; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0.0
    if reset:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() / GIB
