"""LoRA files of a checkpoint: the adapter at its step, beside the state that a resume reads."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trainer.engine.context import Context
from trainer.engine.results import proof
from trainer.errors import DataError
from trainer.files import atomic
from trainer.modeling.adapter import lora
from trainer.telemetry.run_folder.results import LORA_FOLDER
from trainer.words.plurals import numbered


def write_step_lora(context: Context, model: Any, step: int, folder: Path) -> None:
    """Write the adapter as it is on `model`, and its twin for ComfyUI, into `lora/` of a checkpoint's folder.

    Both are read back bit for bit, and the first one is finite, and not zero in all. Where one fails both are
    left out and told: training goes on, and the result is proved at the end. Raises StorageError.
    """
    target = folder / LORA_FOLDER
    with atomic.no_space_told(target):
        target.mkdir()
    name = f"{context.run_dir.resolve().name}-step-{step:06d}"
    path = proof.write_lora(context, model, target, name)
    try:
        proof.check_file(path)
        _require_same_values(path, lora.adapter_state(model))
        proof.write_twin(context, model, target, name)
    except DataError as error:
        shutil.rmtree(target)
        context.say(f"no LoRA file of step {step}: {error.problems[0].what}")


def _require_same_values(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Raise DataError where the file does not hold these tensors, under whatever names its library gives."""
    written, trained = (Counter(map(_values, one.values())) for one in (load_file(path), state))
    if written != trained:
        count = (trained - written).total()
        differ = numbered(count, "tensor read back from disk differs", "tensors read back from disk differ")
        raise DataError(f"{differ} from the trained ones", where=str(path))


def _values(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
