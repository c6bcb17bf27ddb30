"""The process of one measurement: reads a request, a line of JSON, and prints the answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from trainer.engine.probing.attention import measure_attention
from trainer.engine.probing.link import print_link
from trainer.engine.probing.matmul import measure_matmul
from trainer.engine.probing.probe import held_by_others
from trainer.engine.probing.reading import print_rates
from trainer.families.values import AttentionShape
from trainer.planning.shapes.shape_classes import matmul_shape
from trainer.ways.kernels import KERNELS


def main() -> None:
    """Measure a kernel, how fast a file is read, or the way to other GPUs."""
    line = sys.stdin.readline()  # after the imports: they take longer than the process before
    if not line:
        return
    asked = json.loads(line)
    device, _, place = asked["device"].partition(":")
    if place:
        torch.cuda.set_device(int(place))  # the one that "cuda" means from now on
    if "link" in asked:
        rank, size = asked["link"]
        print_link(rank, size, Path(asked["place"]), asked["device"])
        return
    if "file" in asked:
        print_rates(Path(asked["file"]), asked["device"])
        return
    kind, _, name = asked["kernel"].partition(".")
    shape = AttentionShape(**asked["shape"])
    held = held_by_others(device)

    def begin() -> None:
        if device == "cuda":
            torch.cuda.synchronize()  # earlier work must not fail in the kernel's name
        print(json.dumps({"held": held}), flush=True)

    if kind == "attention":
        packaged = bool(KERNELS[name].package)
        measured = measure_attention(name, asked["dtype"], shape, device, begin, packaged=packaged)
    else:
        measured = measure_matmul(name, *matmul_shape(shape), device, begin)
    print(json.dumps({"milliseconds": measured.milliseconds, "errors": dict(measured.errors)}))


if __name__ == "__main__":
    main()
