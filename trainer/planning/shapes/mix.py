"""The usual mix of pictures and captions, and the micro-batches that a step's samples make of it."""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Literal

Captions = Literal["alike", "padded", "as they are"]

Pictures = tuple[tuple[int, int, int], ...]
"""A shape's number, how many pictures have it, and how often each of these comes in an epoch."""

USUAL_PICTURES: Pictures = tuple((shape, 100_000, 1) for shape in range(6))
"""Pictures of a set that is not known: six shapes, any number of each."""

# captions of 1 to 300 tokens, as many short as long by their logarithm
_MOST_TOKENS = 300

_DRAWN, _MOST_RECORDS = 10_000, 2_000


@functools.lru_cache(maxsize=512)
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
    # some samples stand for a large set: one that was drawn does not come again for long
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
    """Lengths of so many captions: as many short as long by their logarithm, in any order."""
    if captions == "alike":
        return [0] * count
    lengths = [min(most, int((_MOST_TOKENS + 1) ** ((at + 0.5) / count))) for at in range(count)]
    chooser.shuffle(lengths)
    return [padded_length(tokens) for tokens in lengths] if captions == "padded" else lengths


TEXT_LENGTHS = (64, 128, 256, 384, 512, 768, 1024)
"""Tokens that captions are padded to; longer ones become multiples of 256. Of captions of 1 to 300 tokens, as
many short as long by their logarithm, 73 % become 64.
"""

_BEYOND = 256
_ROW_MULTIPLE = 64


def padded_length(tokens: int) -> int:
    """The first of `TEXT_LENGTHS` that holds a caption of so many tokens."""
    place = bisect.bisect_left(TEXT_LENGTHS, tokens)
    if place < len(TEXT_LENGTHS):
        return TEXT_LENGTHS[place]
    return -(-tokens // _BEYOND) * _BEYOND


def padded_row(tokens: int) -> int:
    """Tokens that packed rows of at most so many are padded to.

    A multiple of 64, which FP8 products take as they are (`modeling.storage.fp8_product.ROW_MULTIPLE`).
    """
    return -(-tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE
