"""The plan's row on the data set: how many images there are, and how often the run sees each."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

from trainer import families
from trainer.config.schema import RunConfig
from trainer.errors import DataError
from trainer.planning.plan import Decision, Plan
from trainer.planning.shapes.set_look import samples


def with_data(plan: Plan, config: RunConfig) -> Plan:
    """The plan with a row on the data, where all sets are folders of this disk that are counted at once."""
    listed = samples(config.data.sets, families.get(config.family))
    if listed is None:
        return plan
    images = [len(every) for every in listed]
    held_out = min(config.validation.held_out, sum(images))
    longer = math.lcm(*(max(1, one.random_crop) * (2 if one.flip else 1) for one in config.data.sets))
    epoch = longer * sum(one.repeats * count for one, count in zip(config.data.sets, images, strict=True))
    epoch -= longer * held_out
    if epoch < 1:
        return plan
    steps = config.train.max_train_steps
    seen = steps * config.train.train_batch_size * config.train.gradient_accumulation_steps
    reason = f"by their names; {steps} steps see {seen} samples: {seen / epoch:.1f} epochs of {epoch}"
    if held_out:
        reason += f", {held_out} held out"
    row = Decision("data", f"{sum(images)} images", "facts", reason)
    return dataclasses.replace(plan, decisions=(*plan.decisions, row))


def require_dataset(path: Path | None) -> None:
    """Raise DataError where what `--dataset` names is not there; what is in it is checked by the run."""
    # pathlib's exists() raises for a folder above it that may not be entered
    if path is not None and not os.path.exists(path):  # noqa: PTH110
        raise DataError(
            f"{path} does not exist",
            where="--dataset",
            remedy="check its name, and in a container that the folder is mounted and readable for its user",
        )
