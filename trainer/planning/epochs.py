"""How many samples an epoch of the data set holds, and how many steps these are, before anything is loaded.

Pictures are counted by their names, so that their steps are those of the run where no file is left out.
Conversations are counted by their rows, and their tokens guessed from bytes: the run asks the tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import families
from trainer.config.reading.load import Loaded
from trainer.config.schema import DataSet, RunConfig, changed
from trainer.data.conversations.dataset_info import read_entry
from trainer.data.conversations.files import read_rows
from trainer.data.conversations.formats import layout_of_columns
from trainer.data.sets.held_out import held_out_sets
from trainer.errors import TrainerError
from trainer.planning.shapes.set_look import cut, samples

BYTES_A_TOKEN = 4.0
"""Bytes of JSON that become one token, about; of English."""
_MOST_BYTES = 64 << 20
"""Size of a file of conversations that is read for a row of the plan."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The samples of a run's sets."""

    samples: int
    """Files or rows."""
    held_out: int
    in_epoch: int
    """Samples trained on in one epoch: each `repeats` times, and each of its views."""
    exact: bool = True
    """Whether `in_epoch` is the run's: not where some are held out of sets that are repeated unequally, nor
    where it is not known whether pictures are cut (`data.sets.random_crop`).
    """
    tokens: float = 0.0
    """Tokens of an epoch of conversations, about; 0 for pictures."""

    def steps(self, config: RunConfig, epochs: float) -> int:
        """Optimizer steps of so many epochs; of conversations about."""
        train = config.train
        rows = train.train_batch_size * train.gradient_accumulation_steps
        if self.tokens:
            return max(1, math.ceil(epochs * self.tokens / (rows * config.data.max_sequence_length)))
        return max(1, -(-math.ceil(round(epochs * self.in_epoch, 6)) // rows))

    def epochs(self, config: RunConfig, steps: int) -> float:
        """Epochs of so many optimizer steps; of conversations about."""
        train = config.train
        rows = steps * train.train_batch_size * train.gradient_accumulation_steps
        if self.tokens:
            return rows * config.data.max_sequence_length / self.tokens
        return rows / self.in_epoch


def with_epochs(loaded: Loaded) -> Loaded:
    """`loaded` with the steps of `train.num_train_epochs` as `train.max_train_steps`, as far as they are
    known here; as it is where the length is written in steps, or the samples are not counted.
    """
    epochs, found = loaded.config.train.num_train_epochs, None
    if epochs is not None:
        found = count(loaded.config)
    if epochs is None or found is None:
        return loaded
    steps = {"train.max_train_steps": found.steps(loaded.config, epochs)}
    return dataclasses.replace(loaded, config=changed(loaded.config, steps))


def count(config: RunConfig) -> Counted | None:
    """The samples of the sets; None where they are not on this disk, or too many to be counted at once."""
    sets = config.data.sets
    if any(one.has_conversations for one in sets):
        return _conversations(config)
    listed = samples(sets, families.get(config.family), beside=held_out_sets(config.validation))
    if listed is None:
        return None
    images = [len(every) for every in listed]
    held_out = min(config.validation.held_out, sum(images))
    views, views_known = _views(config)
    longer = math.lcm(*views)
    epoch = longer * sum(one.repeats * number for one, number in zip(sets, images, strict=True))
    left = _trained_share(epoch, held_out, sum(images))
    if left < 1:
        return None
    exact = views_known and (not held_out or len({one.repeats for one in sets}) == 1)
    return Counted(samples=sum(images), held_out=held_out, in_epoch=left, exact=exact)


def _views(config: RunConfig) -> tuple[list[int], bool]:
    """Views of the picture of each set that has most of them, and whether these are known: a picture of its
    bucket's shape is not cut, and has one place.
    """
    sets, family = config.data.sets, families.get(config.family)
    looked: Sequence[bool | None] = (True,) * len(sets)
    if any(one.random_crop > 1 for one in sets):
        looked = cut(sets, family, config.data.resolution, beside=held_out_sets(config.validation))
    views = [
        (2 if one.flip else 1) * (1 if some is False else max(1, one.random_crop))
        for one, some in zip(sets, looked, strict=True)
    ]
    known = all(one.random_crop <= 1 or some is not None for one, some in zip(sets, looked, strict=True))
    return views, known


def _trained_share(epoch: int, held_out: int, samples: int) -> int:
    """Samples of an epoch without those held out; exact where all sets are repeated alike."""
    return round(epoch * (samples - held_out) / samples) if samples else 0


def _conversations(config: RunConfig) -> Counted | None:
    rows, epoch, size = 0, 0, 0
    for one in config.data.sets:
        try:
            found = _row_sizes(one)
        except (TrainerError, OSError):  # the run says what is wrong with it
            return None
        if found is None:
            return None
        found = _left(found, config)
        rows += len(found)
        epoch += one.repeats * len(found)
        size += one.repeats * sum(found)
    held_out = min(config.validation.held_out, rows)
    left = _trained_share(epoch, held_out, rows)
    if left < 1:
        return None
    tokens = size / BYTES_A_TOKEN * left / epoch
    return Counted(samples=rows, held_out=held_out, in_epoch=left, tokens=tokens)


def _left(sizes: Sequence[int], config: RunConfig) -> list[int]:
    """Bytes of the conversations that a run is left with, about, where too long ones are skipped or cut."""
    most = round(config.data.max_sequence_length * BYTES_A_TOKEN)
    if config.data.on_long == "skip":
        return [size for size in sizes if size <= most]
    return [min(size, most) if config.data.on_long == "cut" else size for size in sizes]


def _row_sizes(one: DataSet) -> list[int] | None:
    """Bytes of each conversation of a set; None for a file that is too large, or of another kind."""
    path: Path | None = one.chat_file
    layout = layout_of_columns(one.columns.named) if one.columns is not None else None
    if one.dataset_info is not None and one.name is not None:
        path, layout = read_entry(one.dataset_info, one.name)
    if path is None or path.stat().st_size > _MOST_BYTES:
        return None
    contents = (content for _, _, content in read_rows(path, layout))
    # a table may hold values that JSON has not, such as times
    return [len(one) if isinstance(one, bytes) else len(_text(one).encode()) for one in contents]


def _text(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, default=str)
