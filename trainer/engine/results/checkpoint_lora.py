"""LoRA files of a checkpoint: the adapter at its step, beside the state that a resume reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from trainer.engine.context import Context
from trainer.engine.results import proof
from trainer.errors import DataError
from trainer.files import atomic
from trainer.telemetry.run_folder.results import LORA_FOLDER


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
        proof.require_written(path, model)
        proof.write_twin(context, model, target, name)
    except DataError as error:
        shutil.rmtree(target)
        context.say(f"no LoRA file of step {step}: {error.problems[0].what}")
