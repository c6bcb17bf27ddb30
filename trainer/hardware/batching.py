"""Floor 2: a step's samples in micro-batches: smaller ones, and more of them, where that is better."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Literal

from trainer.config.schema import RunConfig
from trainer.hardware.captions import padded_length
from trainer.hardware.geometry import Geometry
from trainer.hardware.plan import Decision


def micro_batches(config: RunConfig) -> int:
    """Batches of the whole run: each is one forward pass where its samples are of one shape, else several."""
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


def one_by_one(config: RunConfig, asked: RunConfig, parts: float, *, graphs: bool) -> Decision:
    """How a step's samples are taken, of which a batch of `asked` would be `parts` of other shapes."""
    size, steps = config.train.train_batch_size, config.train.gradient_accumulation_steps
    less = "less memory and fewer CUDA graphs" if graphs else "less memory"
    reason = (
        f"{asked.train.train_batch_size} samples at once are pictures of {parts:.1f} shapes on average: one"
        f" by one takes about as long, in {less}; a step still has {size * steps}"
    )
    return Decision(feature="micro_batch", value=f"{size} x {steps}", source="auto", reason=reason)


Captions = Literal["alike", "padded", "as they are"]
Pictures = tuple[tuple[int, int, int], ...]
"""A shape's number, how many pictures have it, and how often each of these comes in an epoch."""
USUAL_PICTURES: Pictures = tuple((shape, 100_000, 1) for shape in range(6))
"""Of a set that is not known: six shapes, any number of each."""
# captions of 1 to 300 tokens, as many short as long by their logarithm
_MOST_TOKENS = 300
_DRAWN, _MOST_RECORDS = 10_000, 2_000


@functools.lru_cache(maxsize=64)
def usual_parts(
    size: int,
    samples: int,
    *,
    captions: Captions,
    pictures: Pictures = USUAL_PICTURES,
    most_tokens: int = _MOST_TOKENS,
) -> tuple[float, ...]:
    """Micro-batches, on average, of a step of `samples`: those of one, of two, up to those of `size` of them.

    Those of one shape go together. Captions are of 1 to 300 tokens, cut to `most_tokens`. Counted by drawing
    steps as the sampler does, the same ones every time: no picture is twice in a step, where an epoch fills
    one.
    """
    if size == 1:
        return (float(samples),)
    # of a large set some: what was drawn does not come again for long
    scale = min(1.0, max(_MOST_RECORDS, 8 * samples) / sum(count for _, count, _ in pictures))
    kinds = [
        (shape, repeats) for shape, count, repeats in pictures for _ in range(max(1, round(count * scale)))
    ]
    chooser = random.Random(0)
    lengths = _caption_lengths(len(kinds), captions, most_tokens, chooser)
    shapes = [(shape, tokens) for (shape, _), tokens in zip(kinds, lengths, strict=True)]
    steps = max(8, _DRAWN // samples)
    parts = [0] * size
    for step in itertools.islice(_steps([repeats for _, repeats in kinds], samples, chooser), steps):
        for count in collections.Counter(shapes[picture] for picture in step).values():
            full, rest = divmod(count, size)
            parts[-1] += full
            if rest:
                parts[rest - 1] += 1
    return tuple(one / steps for one in parts)


def _steps(repeats: list[int], samples: int, chooser: random.Random) -> Iterator[list[int]]:
    """Steps of one epoch after another; what is in a step already is among the first of the next."""
    most, waiting = min(samples, len(repeats)), list[int]()
    stream = itertools.chain.from_iterable(_epoch(repeats, chooser) for _ in itertools.count())
    while True:
        step = dict.fromkeys(waiting)
        waiting = []
        while len(step) < most:
            picture = next(stream)
            if picture in step:
                waiting.append(picture)
            step[picture] = None
        # an epoch that does not fill a step comes more than once in it
        yield [*step, *itertools.islice(stream, samples - most)]


def _epoch(repeats: list[int], chooser: random.Random) -> list[int]:
    """Pictures in any order; one that comes r times is once in each r-th part."""
    places = (
        ((turn + chooser.random()) / times, picture)
        for picture, times in enumerate(repeats)
        for turn in range(times)
    )
    return [picture for _, picture in sorted(places)]


def _caption_lengths(count: int, captions: Captions, most: int, chooser: random.Random) -> list[int]:
    """Of so many captions the lengths: as many short as long by their logarithm, in any order."""
    if captions == "alike":
        return [0] * count
    lengths = [min(most, int((_MOST_TOKENS + 1) ** ((at + 0.5) / count))) for at in range(count)]
    chooser.shuffle(lengths)
    return [padded_length(tokens) for tokens in lengths] if captions == "padded" else lengths


_SEVERAL = 1.05
_MIX = "with captions of 1 to 300 tokens, as many short as long by their logarithm; "


def time_row(
    milliseconds: float, config: RunConfig, gpu: str, *, geometry: Geometry, parts: float
) -> Decision:
    """The predicted time of a batch; where captions are not of one length, of a usual mix of them.

    `parts` are the micro-batches that its samples make.
    """
    source = "prediction"
    if not milliseconds:
        reason = f"the rates of {gpu} are not known"
        return Decision(feature="step_time", value="unknown", source=source, reason=reason)
    size = config.train.train_batch_size
    of, every = "one micro-batch", f"for all {micro_batches(config)}"
    if parts > _SEVERAL:
        every += " batches"
        shapes = "of the shapes of this set" if geometry.pictures_known else "of six shapes"
        of = f"{size} samples, {parts:.1f} micro-batches where pictures are {shapes}"
    whole = micro_batches(config) * milliseconds / 3.6e6
    mix = _MIX if geometry.captions_vary else ""
    reason = f"predicted, not measured: {of}; {mix}{whole:.1f} h {every}"
    return Decision(feature="step_time", value=f"{milliseconds:.0f} ms", source=source, reason=reason)
