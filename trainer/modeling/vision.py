"""Torchvision beside a torch without CUDA, which some processors of transformers import.

Its published wheel is compiled for CUDA. Where torch is a CPU build that compiled part does not load, and
`import torchvision` fails because operators are missing that it describes: nothing here calls them.
"""

from __future__ import annotations

import functools
import importlib.metadata

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# for the life of the process: a library that is collected takes its operators with it
_KEPT: list[object] = []


@functools.cache
def make_torchvision_importable() -> None:
    """Declare the operators that are missing beside a CPU build of torch; call it before transformers loads.

    Does nothing where torchvision is not installed, or was compiled for this torch.
    """
    import torch

    try:
        version = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return
    if torch.version.cuda is not None or "+cpu" in version:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in _OPERATORS:
        library.define(operator)
    _KEPT.append(library)
