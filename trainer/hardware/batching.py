"""Floor 2: a step's samples in micro-batches: smaller ones, and more of them, where that is better."""

from __future__ import annotations

import bisect
import collections
import functools
import math
from collections.abc import Iterator
from typing import Literal

from trainer.config.schema import RunConfig
from trainer.hardware.captions import TEXT_LENGTHS
from trainer.hardware.geometry import Geometry
from trainer.hardware.plan import Decision


def micro_batches(config: RunConfig) -> int:
    """Forward passes of the whole run where all samples of a step have one shape; else more, smaller ones."""
    return config.train.max_train_steps * config.train.gradient_accumulation_steps


def smaller(config: RunConfig) -> Iterator[RunConfig]:
    """The configuration with each smaller divisor as batch size, and as many samples a step as before."""
    train = config.train
    for size in range(train.train_batch_size - 1, 0, -1):
        if train.train_batch_size % size == 0:
            accumulation = train.gradient_accumulation_steps * (train.train_batch_size // size)
            changes = {"train_batch_size": size, "gradient_accumulation_steps": accumulation}
            yield config.model_copy(update={"train": train.model_copy(update=changes)})


def row(config: RunConfig, asked: RunConfig, how: str) -> Decision:
    """How a step's samples are parted, other than `asked`, the configuration that was written.

    `how` says by what setting the written micro-batches would fit; empty where they do not.
    """
    size, steps = config.train.train_batch_size, config.train.gradient_accumulation_steps
    written = asked.train.train_batch_size
    why = f"fit only in {how}" if how else "do not fit"
    reason = f"{written} samples at once {why}; a step still has {size * steps}"
    return Decision(feature="micro_batch", value=f"{size} x {steps}", source="auto", reason=reason)


USUAL_PICTURES = (1 / 6,) * 6
"""The share of samples that each shape of picture has in a set that is not known."""
# captions of 1 to 300 tokens, as many short as long by their logarithm
_MOST_TOKENS = 300
# larger steps are parted in the proportions of this one
_COUNTED = 3000
_UNLIKELY = 1e-12


@functools.lru_cache(maxsize=64)
def usual_parts(
    size: int,
    samples: int,
    *,
    captions: Literal["alike", "padded", "as they are"],
    pictures: tuple[float, ...] = USUAL_PICTURES,
) -> tuple[float, ...]:
    """Micro-batches, on average, of a step of `samples`: those of one, of two, up to those of `size` of them.

    Those of one shape go together. `pictures` are the shares of the shapes of pictures; captions are of 1 to
    300 tokens.
    """
    if size == 1:
        return (float(samples),)
    if samples > _COUNTED:
        counted = usual_parts(size, _COUNTED, captions=captions, pictures=pictures)
        return tuple(samples / _COUNTED * one for one in counted)
    parts = [0.0] * size
    for share, how_many in collections.Counter(pictures).items():
        for caption in _caption_shares(captions):
            for count, likely in _counts(samples, share * caption):
                full, rest = divmod(count, size)
                parts[-1] += how_many * likely * full
                if rest:
                    parts[rest - 1] += how_many * likely
    return tuple(parts)


def _caption_shares(captions: Literal["alike", "padded", "as they are"]) -> Iterator[float]:
    """The share of all captions that each length has."""
    if captions == "alike":
        yield 1.0
        return
    ends = tuple(range(1, _MOST_TOKENS + 1))
    if captions == "padded":
        ends = (*TEXT_LENGTHS[: bisect.bisect_left(TEXT_LENGTHS, _MOST_TOKENS)], _MOST_TOKENS)
    before = 0.0
    for end in ends:
        reached = math.log(end + 1) / math.log(_MOST_TOKENS + 1)
        yield reached - before
        before = reached


def _counts(samples: int, share: float) -> Iterator[tuple[int, float]]:
    """How many of `samples` are of a shape with this share, each number with its probability."""
    if share == 1.0:
        yield samples, 1.0
        return
    likely = (1 - share) ** samples
    for count in range(1, samples + 1):
        likely *= (samples - count + 1) / count * share / (1 - share)
        yield count, likely
        if count > samples * share and likely < _UNLIKELY:
            return


_MIX = "with captions of 1 to 300 tokens, as many short as long by their logarithm; "


def time_row(
    milliseconds: float, config: RunConfig, gpu: str, *, geometry: Geometry, parts: float
) -> Decision:
    """The predicted time of one micro-batch; where captions are not of one length, of a usual mix of them.

    Where it is one of several samples they are of usual shapes, and make more than one: `parts`.
    """
    source = "prediction"
    if not milliseconds:
        reason = f"the rates of {gpu} are not known"
        return Decision(feature="step_time", value="unknown", source=source, reason=reason)
    size = config.train.train_batch_size
    of = "one micro-batch"
    if parts > 1:
        shapes = "of the shapes of this set" if geometry.pictures_known else "of six shapes"
        of = f"{size} samples, {parts:.1f} micro-batches where pictures are {shapes}"
    whole = micro_batches(config) * milliseconds / 3.6e6
    mix = _MIX if geometry.captions_vary else ""
    hours = f"{whole:.1f} h for all {micro_batches(config)}"
    reason = f"predicted, not measured: {of}; {mix}{hours}"
    return Decision(feature="step_time", value=f"{milliseconds:.0f} ms", source=source, reason=reason)
