"""A run that goes on keeps what `auto` decided when it began. Imports no torch.

Verdicts and free memory change between two starts; how the base is stored and how a step's samples are parted
may not, because the checkpoint was trained so.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from trainer.config.reading.load import Loaded
from trainer.config.schema import RunConfig, changed
from trainer.errors import ConfigError
from trainer.files import atomic
from trainer.planning.choose.optimizers import STOCHASTIC
from trainer.telemetry.run_folder.plan import PLAN_FILE
from trainer.telemetry.run_folder.results import has_checkpoint


def continued(loaded: Loaded) -> Loaded:
    """`loaded` with the decisions of the run that it goes on with, where nothing else was written.

    Raises ConfigError for a plan that cannot be read, StorageError for a folder.
    """
    config = loaded.config
    path = config.output_dir / PLAN_FILE
    if config.checkpoint.resume_from_checkpoint == "never" or not going_on(config) or not path.is_file():
        return loaded
    began, kept, train, features = _read(path), dict[str, Any](), config.train, config.features
    size, steps = began.get("micro_batch_size", 0), began.get("accumulation_steps", 0)
    as_many = size * steps == train.train_batch_size * train.gradient_accumulation_steps
    if as_many and size != train.train_batch_size:
        kept = {"train.train_batch_size": size, "train.gradient_accumulation_steps": steps}
    # of a LoRA in this folder the run's record says what differs
    if config.method == "full" and train.optimizer == "adamw" and began.get("optimizer") == STOCHASTIC:
        kept["train.optimizer"] = STOCHASTIC
    if config.model.dtype == "auto" and "dtype" in began:
        kept["model.dtype"] = began["dtype"]
    # fp16 follows from model.dtype, and is no word of this key
    if features.weights == "auto" and began.get("weights", "fp16") != "fp16":
        kept["features.weights"] = began["weights"]
    # how an FP8 base is multiplied, and how its modulation is stored
    if kept.get("features.weights", features.weights) == "fp8" == began.get("weights"):
        if features.compute == "auto" and began.get("compute") in ("bf16", "fp8"):
            kept["features.compute"] = began["compute"]
        if features.modulation == "auto":
            # plans of before there was a choice do not name it
            kept["features.modulation"] = began.get("modulation") or "kept"
    return dataclasses.replace(
        loaded,
        config=changed(config, kept),
        sources={**loaded.sources, **dict.fromkeys(kept, str(path))},
        goes_on=True,
    )


def starts_from_checkpoint(config: RunConfig) -> bool:
    """True if the next start of this run takes a checkpoint, its own or a named one, whose values then hold.

    Raises StorageError where the run's folder cannot be read.
    """
    asked = config.checkpoint.resume_from_checkpoint
    return asked not in ("auto", "never") or (asked == "auto" and going_on(config))


def going_on(config: RunConfig) -> bool:
    """True if the run's folder holds a checkpoint. Raises StorageError where that cannot be read."""
    with atomic.reading_told(config.output_dir):
        return has_checkpoint(config.output_dir)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the run's plan cannot be read ({error})",
            where=str(path),
            remedy="move it away: the run then goes on as is decided now, if its checkpoint allows that",
        ) from error
    return content
