"""Time a LoRA checkpoint: writing it, checking it, reading it back.

    python -m bench save --folder DIR --tensors 1000

Weights and both moments of as many fp32 tensors, through the trainer's own checkpoint code, which syncs
every file. Prints one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import arguments as types
from trainer.engine.records import checkpoint

ROW, RANK = 3072, 16


def main(arguments: Sequence[str] | None = None) -> None:
    """Save, check and read `--repeats` times; print medians."""
    parser = types.command_parser("save", __doc__)
    add = parser.add_argument
    add("--folder", type=types.folder, default=Path("build"),
        help="on the disk to measure; what is written there goes again. Default: build")  # fmt: skip
    add("--tensors", type=types.positive, default=1000)
    add("--repeats", type=types.positive, default=5)
    add("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    weights = adapter(options.tensors, options.device)
    optimizer = {
        f"{name}.{moment}": torch.rand_like(tensor)
        for name, tensor in weights.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    times: dict[str, list[float]] = {"save": [], "check": [], "read": []}
    with tempfile.TemporaryDirectory(prefix="bench-save-", dir=options.folder) as scratch:
        folder = Path(scratch)
        for step in range(options.repeats):
            snapshot = checkpoint.Snapshot(step=step, interval_loss=0.0, interval_steps=0, fingerprint={})
            started = time.perf_counter()
            saved_in = checkpoint.save(
                folder, snapshot, weights, optimizer, least_bytes=0, keep=1, on_tensor=lambda: None
            )
            saved = time.perf_counter()
            problem = checkpoint.damage(saved_in, lambda: None)
            checked = time.perf_counter()
            found = checkpoint.read_group(saved_in, "weights", options.device)
            ended = time.perf_counter()
            assert problem is None, problem
            assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
            for kind, seconds in zip(times, (saved - started, checked - saved, ended - checked), strict=True):
                times[kind].append(seconds)
    size = sum(tensor.nbytes for tensor in (*weights.values(), *optimizer.values()))
    medians = {f"{name}_seconds": round(statistics.median(values), 4) for name, values in times.items()}
    slowest = {"save_slowest_seconds": round(max(times["save"]), 4)}
    print(json.dumps({"tensors": options.tensors, "mib": round(size / 2**20, 1), **medians, **slowest}))


def adapter(count: int, device: str) -> dict[str, torch.Tensor]:
    """`count` tensors in fp32: pairs of rank 16 for square layers."""
    return {
        f"blocks.{index // 2:04}.lora_{'AB'[index % 2]}": torch.rand(
            (RANK, ROW) if index % 2 == 0 else (ROW, RANK), device=device
        )
        for index in range(count)
    }
