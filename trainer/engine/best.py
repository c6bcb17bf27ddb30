"""Floor 6: the LoRA of the lowest held-out loss, kept in `best/` and measured from its file at the end."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch

from trainer.engine import proof
from trainer.engine.context import Context
from trainer.engine.validation import HeldOut, measure
from trainer.errors import DataError
from trainer.modeling import lora
from trainer.telemetry import atomic
from trainer.telemetry.records import ValidationRecord

FOLDER, RECORD = "best", "best.json"
_TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest relative difference between the loss in training and from the file, without what joins layers."""


def keep(context: Context, model: Any, record: ValidationRecord) -> None:
    """Write the adapter as it is where no kept one has a lower loss on the same held-out samples."""
    if not _wanted(context) or not math.isfinite(record.validation_loss):
        return
    kept = read(context.run_dir)
    comparable = kept is not None and kept["validation_data"] == record.validation_data
    if kept is not None and comparable and kept["validation_loss"] <= record.validation_loss:
        return
    folder = context.run_dir / FOLDER
    temporary = context.run_dir / f"{FOLDER}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with atomic.no_space_told(folder):
            temporary.mkdir(parents=True)
        path, _ = proof.write_lora_files(context, model, temporary)
        row = {"file": path.name, **vars(record)}
        atomic.write_text(temporary / RECORD, json.dumps(row, indent=1, sort_keys=True) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    context.say(f"best so far: step {record.step}, held-out loss {record.validation_loss:.4g}")


def forget(context: Context) -> None:
    """Remove what an earlier start of this run kept, which starts afresh."""
    shutil.rmtree(context.run_dir / FOLDER, ignore_errors=True)


def read(run_dir: Path) -> dict[str, Any] | None:
    """What is known of the kept one: step, validation_loss, validation_data, file; None without one."""
    path = run_dir / FOLDER / RECORD
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def prove(context: Context, model: Any, held_out: HeldOut | None, last: Path) -> str:
    """Measure the kept file's loss again and say what it is; the adapter of `last` is on `model` before and
    after. Empty where nothing was kept. Raises DataError when it is another loss.
    """
    kept = read(context.run_dir)
    if not _wanted(context) or held_out is None or kept is None:
        return ""
    path = context.run_dir / FOLDER / kept["file"]
    _exchange(context, model, path)
    again = measure(context, model, held_out, step=kept["step"]).validation_loss
    _exchange(context, model, last)
    loss = kept["validation_loss"]
    if abs(again - loss) > _TOLERANCE[context.dtype] * abs(loss):
        raise DataError(
            f"loaded from disk, the LoRA of step {kept['step']} has a held-out loss of {again:.6g},"
            f" in training it was {loss:.6g}",
            where=str(path),
            remedy="this is a defect of the trainer: the checkpoints are intact, please report it",
        )
    return f"best: step {kept['step']}, held-out loss {loss:.4g} (from its file {again:.4g}): {path}"


def _wanted(context: Context) -> bool:
    return context.config.checkpoint.keep_best and context.config.method == "lora"


def _exchange(context: Context, model: Any, path: Path) -> None:
    lora.remove_lora(model)
    proof.load_lora(context, model, path)
