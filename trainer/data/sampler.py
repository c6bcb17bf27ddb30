"""The samples of optimizer step n, from the seed alone, without generator state."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from trainer.data.records import Record
from trainer.errors import DataError
from trainer.words.plurals import numbered


@dataclass(frozen=True, kw_only=True)
class SampleRef:
    """One sample of the stream."""

    record: int
    """Index of the record."""
    position: int
    """Number of the sample in the stream; all of its randomness comes from (seed, position)."""
    dropped: bool
    """Whether the sample is trained with the empty caption."""


MicroBatch = tuple[SampleRef, ...]
"""Samples of one key, in the order in which the step took them."""


@dataclass(eq=False, kw_only=True)
class _Row:
    """Samples of one key that are packed into one row, and the sum of their sizes."""

    key: Hashable
    samples: list[SampleRef] = field(default_factory=list)
    size: int = 0


_WAITING = 8
"""Samples that may wait for room in a later step, and twice a step's rows where that is more: more of them
fill rows better, and keep samples longer. As many may wait because the step holds their content, and twice
the step's samples where that is more."""


class Sampler:
    """An endless stream of samples, parted into optimizer steps, and these into micro-batches of equal key.

    A step has `rows` rows of `row_size`: a row is one sample, or as many as are packed into it by their
    `sizes`. Its samples are drawn before their keys are looked at, so that what a step learns from depends
    neither on the keys nor on `rows_at_once`, the most rows of a micro-batch.

    The stream is one shuffled epoch after another; an epoch holds record i `repeats[i]` times. A sample that
    fits no row of its step, or whose content is in that step already, waits and is among the first of the
    next one: nothing is left out, and nothing comes twice in a step where an epoch makes up as many full
    steps as its most frequent content has copies.
    `keys[i]` is record i's key, `dropped_keys[i]` the one it has with the empty caption; records of equal
    `contents` show the same.
    """

    def __init__(
        self,
        keys: Sequence[Hashable],
        dropped_keys: Sequence[Hashable],
        repeats: Sequence[int],
        *,
        contents: Sequence[Hashable],
        sizes: Sequence[int],
        row_size: int,
        rows: int,
        rows_at_once: int,
        caption_dropout_rate: float,
        seed: int,
    ) -> None:
        assert len(keys) == len(dropped_keys) == len(repeats) == len(contents) == len(sizes), (
            "one key, dropped key, repeat count, content and size per record"
        )
        assert min(sizes) >= 1 and max(sizes) <= row_size, "a sample that fits in no row"
        assert sum(repeats) >= 1 and min(repeats) >= 0, "nothing to sample"
        assert rows >= rows_at_once >= 1, "a micro-batch is larger than a step"
        self._keys, self._dropped_keys, self._contents = tuple(keys), tuple(dropped_keys), tuple(contents)
        self._sizes, self._row_size = tuple(sizes), row_size
        self._caption_dropout_rate, self._seed = caption_dropout_rate, seed
        self.rows, self._rows_at_once = rows, rows_at_once
        """Rows of a step, and the most that a micro-batch takes."""
        self._slots = tuple(record for record, count in enumerate(repeats) for _ in range(count))
        once = {self._contents[record]: self._sizes[record] for record in self._slots}
        self._fills_a_step = sum(once.values()) >= rows * row_size
        copies = max(Counter(self._contents[record] for record in self._slots).values())
        self._is_crowded = sum(self._sizes[record] for record in self._slots) < copies * rows * row_size
        self._start_over()

    def step(self, n: int) -> tuple[MicroBatch, ...]:
        """Micro-batches of step n, those of one key after another.

        Steps count from 0: cheap when n is one above the last, else a replay to n.
        """
        assert n >= 0, "steps count from 0"
        if n < self._next:
            self._start_over()
        while self._next < n:
            self._draw()
        by_key: dict[Hashable, list[_Row]] = {}
        for row in self._draw():
            by_key.setdefault(row.key, []).append(row)
        return tuple(
            tuple(sample for row in part for sample in row.samples)
            for same in by_key.values()
            for part in (same[n : n + self._rows_at_once] for n in range(0, len(same), self._rows_at_once))
        )

    def epoch_order(self, epoch: int) -> list[int]:
        """Records of one epoch in their order: sorted by hash, so the same on every machine and version.

        A content that is there r times is once in every r-th part of the epoch.
        """
        copies: dict[Hashable, list[int]] = {}
        for slot, record in enumerate(self._slots):
            copies.setdefault(self._contents[record], []).append(slot)
        places: list[tuple[float, int]] = []
        for slots in copies.values():
            if len(slots) > 1:  # views of one picture take turns in no fixed order
                slots.sort(key=functools.partial(_hash, self._seed, "copies", epoch))
            for number, slot in enumerate(slots):
                places.append(((number + _uniform(self._seed, "shuffle", epoch, slot)) / len(slots), slot))
        return [self._slots[slot] for _, slot in sorted(places)]

    def _start_over(self) -> None:
        """Go back to before the first sample."""
        self._next = 0
        self._waiting: deque[SampleRef] = deque()
        self._stream = self._samples()

    def _samples(self) -> Iterator[SampleRef]:
        """The stream from its start."""
        position = 0
        while True:
            for record in self.epoch_order(position // len(self._slots)):
                dropped = _uniform(self._seed, "caption dropout", position) < self._caption_dropout_rate
                yield SampleRef(record=record, position=position, dropped=dropped)
                position += 1

    def _draw(self) -> list[_Row]:
        """The next step's rows: what waits goes first, then the stream."""
        self._next += 1
        rows: list[_Row] = []
        contents: set[Hashable] = set()
        passed_over: list[SampleRef] = []
        without_room = twice = 0
        limit = max(_WAITING, 2 * self.rows)
        while without_room < limit and twice < max(limit, 2 * len(contents)):
            if len(rows) == self.rows and all(row.size == self._row_size for row in rows):
                break
            sample = self._waiting.popleft() if self._waiting else next(self._stream)
            content = self._contents[sample.record]
            if self._fills_a_step and content in contents:
                twice += 1
                passed_over.append(sample)
            elif self._put(rows, sample):
                contents.add(content)
            else:
                without_room += 1
                passed_over.append(sample)
        if twice >= limit:
            # also of contents that are in the step: where a row would stay empty, or where one content is
            # repeated so often that steps without copies of it would hold next to nothing
            passed_over = [
                sample
                for sample in passed_over
                if not ((self._is_crowded or len(rows) < self.rows) and self._put(rows, sample))
            ]
        self._waiting.extendleft(reversed(passed_over))
        return rows

    def _put(self, rows: list[_Row], sample: SampleRef) -> bool:
        """Add a sample to the fullest row of its key that has room, or open one; whether there was room."""
        size = self._sizes[sample.record]
        key = self._dropped_keys[sample.record] if sample.dropped else self._keys[sample.record]
        fitting = [row for row in rows if row.size + size <= self._row_size and row.key == key]
        if not fitting:
            if len(rows) == self.rows:
                return False
            rows.append(_Row(key=key))
            fitting = rows[-1:]
        chosen = max(fitting, key=operator.attrgetter("size"))
        chosen.samples.append(sample)
        chosen.size += size
        return True


def held_out_split(
    records: Sequence[Record], count: int, seed: int
) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """Split into (train, held out), the latter with `count` samples picked by the hash of seed and content.

    The pick does not depend on names, folders or the order of sets. Files of equal content stay together, so
    that nothing held out is trained on. Both parts keep the records' order. Raises DataError when impossible.
    """
    twins = Counter(record.content_sha256 for record in records)
    held_out: set[str] = set()
    missing = count
    for content in sorted(twins, key=functools.partial(_hash, seed, "held out")):
        if twins[content] <= missing:
            held_out.add(content)
            missing -= twins[content]
    if missing or count >= len(records):
        copies = len(records) - len(twins)
        because = f", {copies} of them copies of others" if copies else ""
        held = f"the sets hold {len(records)}{because}, and one must train"
        what = f"{numbered(count, 'sample')} cannot be held out: {held}"
        raise DataError(what, where="validation.held_out", remedy="hold out fewer, or add some")
    train = tuple(record for record in records if record.content_sha256 not in held_out)
    return train, tuple(record for record in records if record.content_sha256 in held_out)


def _hash(seed: int, purpose: str, *parts: int | str) -> int:
    """64 well-mixed bits from the seed, what they are for, and numbers or texts."""
    text = "\x00".join([str(seed), purpose, *(str(part) for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _uniform(seed: int, purpose: str, *parts: int | str) -> float:
    """A number in [0, 1) in steps of 2^-53."""
    return (_hash(seed, purpose, *parts) >> 11) * 2.0**-53
