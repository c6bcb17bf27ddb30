"""Floor 6: what a plan knows of the data set: how many images there are, and of how many shapes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.schema import DataSet, RunConfig
from trainer.data.buckets import Size, buckets, nearest_bucket
from trainer.data.images import claimed_size
from trainer.data.listing import list_folder
from trainer.errors import DataError
from trainer.hardware.plan import Decision, Plan

_MOST_MEASURED = 200
"""Pictures of a set that are looked at for their shapes."""
_MOST_COUNTED = 20_000
"""Files and folders of a set that are counted; a larger set is not listed twice for one row."""


def with_data(plan: Plan, config: RunConfig) -> Plan:
    """The plan with a row on the data, where all sets are folders of this disk that are counted at once."""
    listed = _listed(config)
    if listed is None:
        return plan
    images = [len(paths) for paths in listed]
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
    row = Decision(feature="data", value=f"{sum(images)} images", source="facts", reason=reason)
    return dataclasses.replace(plan, decisions=(*plan.decisions, row))


def require_dataset(path: Path | None) -> None:
    """Raise DataError where what `--dataset` names is not there; what is in it is checked by the run."""
    if path is None:
        return
    try:
        found = path.exists()
    except OSError:  # a folder above it that may not be entered
        found = False
    if not found:
        raise DataError(
            f"{path} does not exist",
            where="--dataset",
            remedy="check its name, and in a container that the folder is mounted and readable for its user",
        )


@dataclass(frozen=True, kw_only=True)
class PictureSize:
    """Of a picture that was looked at: its sides in pixels, and how many samples it stands for."""

    width: int
    height: int
    weight: float


def picture_sizes(config: RunConfig) -> tuple[PictureSize, ...]:
    """Of some pictures of each set, as their first bytes say; empty where the sets are not known at once."""
    listed = _listed(config) or ()
    found = []
    for one, images in zip(config.data.sets, listed, strict=bool(listed)):
        some = images[:: -(-len(images) // _MOST_MEASURED)]
        sizes = [size for size in map(claimed_size, some) if size is not None]
        weight = one.repeats * len(images) / max(1, len(sizes))
        found += [PictureSize(width=width, height=height, weight=weight) for width, height in sizes]
    return tuple(found)


def picture_shares(sizes: Sequence[PictureSize], resolution: int, multiple: int) -> tuple[float, ...]:
    """The share of samples in each bucket that pictures of these sizes come into."""
    if not sizes or resolution < multiple:
        return ()
    weights: dict[Size, float] = {}
    for one in sizes:
        bucket = nearest_bucket(one.width, one.height, buckets(resolution, multiple))
        weights[bucket] = weights.get(bucket, 0.0) + one.weight
    return tuple(sorted(weight / sum(weights.values()) for weight in weights.values()))


def _listed(config: RunConfig) -> list[tuple[Path, ...]] | None:
    """The images of each set; None where they are not known at once."""
    found = []
    for one in config.data.sets:
        if one.img_dir is None or not _is_small(one.img_dir):
            return None
        apart = [folder for other in config.data.sets for folder in _folders(other) if folder != one.img_dir]
        found.append(list_folder(one.img_dir, apart=apart).images)
    return found if all(found) else None


def _folders(one: DataSet) -> list[Path]:
    """All folders of a set."""
    return [path for path in (one.img_dir, *_several(one.control_dir), *_several(one.mask_dir)) if path]


def _several(value: Path | tuple[Path, ...] | None) -> tuple[Path, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def _is_small(folder: Path) -> bool:
    """Whether a folder of this disk holds few enough files to be listed for a row."""
    entries = itertools.chain.from_iterable((*inside, *files) for _, inside, files in os.walk(folder))
    return sum(1 for _ in itertools.islice(entries, _MOST_COUNTED + 1)) <= _MOST_COUNTED
