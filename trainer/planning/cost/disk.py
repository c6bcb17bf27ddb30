"""Predicted disk of a run, in bytes."""

from __future__ import annotations

from trainer.planning.cost import states
from trainer.planning.cost.storage import Storage, parameters
from trainer.planning.cost.trained_memory import FP32_MORE_BYTES
from trainer.planning.shapes.geometry import Geometry


def disk_bytes(storage: Storage, geometry: Geometry, *, checkpoints: int, copies: int = 1) -> int:
    """Disk for as many checkpoints as exist at one time, and the final files in so many `copies`.

    A checkpoint holds the master weights and the optimizer's state, in the types that they train in. The
    final files are the adapter twice (diffusers and ComfyUI) or the whole model.
    """
    size, lora = storage.value_bytes, storage.method == "lora"
    count = geometry.lora_parameters if lora else parameters(geometry, "trained")
    master, final = (4, 2 * size) if lora else (size, size)
    optimizer = states.of(storage.method, storage.dtype, storage.optimizer)[2]
    mean = states.MEAN_BYTES if storage.averaged else 0
    # parameters that a run in bf16 keeps in fp32, in the weights and in the optimizer's state
    more = 0 if lora else geometry.fp32_parameters * FP32_MORE_BYTES
    each = int(count * (master + optimizer + mean)) + 2 * more
    return checkpoints * each + copies * (count * final + more)
