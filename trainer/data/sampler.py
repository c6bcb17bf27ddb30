"""Floor 4: which samples make up micro-batch n, from the seed alone, without generator state."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from trainer.data.records import Record
from trainer.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SampleRef:
    """One sample of the stream."""

    record: int
    """Index of the record."""
    position: int
    """Number of the sample in the stream; all of its randomness comes from (seed, position)."""
    dropped: bool
    """Whether it is trained with the empty caption."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples of one key, in stream order."""

    samples: tuple[SampleRef, ...]


@dataclass(eq=False)
class _Queue:
    """Samples of one key that wait, and the sum of their sizes."""

    samples: list[SampleRef] = field(default_factory=list)
    size: int = 0


_OPEN_QUEUES = 8
"""Queues of one key that wait for samples that fill them: more fill better, and keep samples longer."""


class Sampler:
    """An endless stream of samples, grouped into micro-batches of equal key.

    The stream is one shuffled epoch after another; an epoch holds record i `repeats[i]` times. Samples wait
    in queues per key, across epochs, and a queue whose `sizes` reach `capacity` is the next micro-batch:
    nothing is left out or padded. A sample that fits into no queue opens another; of too many the oldest
    is the next micro-batch. `keys[i]` is record i's key, `dropped_keys[i]` the one it has with the empty
    caption.
    """

    def __init__(
        self,
        keys: Sequence[Hashable],
        dropped_keys: Sequence[Hashable],
        repeats: Sequence[int],
        *,
        sizes: Sequence[int],
        capacity: int,
        caption_dropout_rate: float,
        seed: int,
    ) -> None:
        assert len(keys) == len(dropped_keys) == len(repeats) == len(sizes), (
            "one key, dropped key, repeat count and size per record"
        )
        assert min(sizes) >= 1 and max(sizes) <= capacity, "a sample that fits in no micro-batch"
        assert sum(repeats) >= 1 and min(repeats) >= 0, "nothing to sample"
        self._keys = tuple(keys)
        self._dropped_keys = tuple(dropped_keys)
        self._sizes, self._capacity = tuple(sizes), capacity
        self._caption_dropout_rate = caption_dropout_rate
        self._seed = seed
        self._slots = tuple(record for record, count in enumerate(repeats) for _ in range(count))
        self._start_over()

    @property
    def samples_per_epoch(self) -> int:
        """Samples after which every record was drawn `repeats` times."""
        return len(self._slots)

    def micro_batch(self, n: int) -> MicroBatch:
        """Micro-batch n, counted from 0: cheap when n is one above the last one, else a replay up to n."""
        assert n >= 0, "micro-batches count from 0"
        if n < self._next:
            self._start_over()
        while self._next < n:
            self._advance()
        return self._advance()

    def sample(self, position: int, epoch_order: Sequence[int]) -> SampleRef:
        """The sample at a position of the stream, given its epoch's order."""
        return SampleRef(
            record=epoch_order[position % len(self._slots)],
            position=position,
            dropped=_uniform(self._seed, "caption dropout", position) < self._caption_dropout_rate,
        )

    def epoch_order(self, epoch: int) -> list[int]:
        """Records of one epoch in their order: sorted by hash, so the same on every machine and version."""
        order = sorted(
            range(len(self._slots)), key=lambda slot: (_hash(self._seed, "shuffle", epoch, slot), slot)
        )
        return [self._slots[slot] for slot in order]

    def _start_over(self) -> None:
        """Go back to before the first sample."""
        self._next = 0
        self._queues: dict[Hashable, list[_Queue]] = {}
        self._stream = self._samples()

    def _samples(self) -> Iterator[SampleRef]:
        """The stream from its start."""
        position = 0
        while True:
            order = self.epoch_order(position // len(self._slots))
            for _ in order:
                yield self.sample(position, order)
                position += 1

    def _advance(self) -> MicroBatch:
        """Read the stream until a queue is full, and empty that one."""
        for sample in self._stream:
            key = self._dropped_keys[sample.record] if sample.dropped else self._keys[sample.record]
            done = self._put(self._queues.setdefault(key, []), sample)
            if done is not None:
                self._next += 1
                return MicroBatch(samples=tuple(done.samples))
        raise AssertionError("the stream has no end")

    def _put(self, queues: list[_Queue], sample: SampleRef) -> _Queue | None:
        """Add a sample to the fullest queue that has room; gives the queue that is complete, if any."""
        size = self._sizes[sample.record]
        fitting = [queue for queue in queues if queue.size + size <= self._capacity]
        chosen = max(fitting, key=lambda queue: queue.size) if fitting else _Queue()
        if not fitting:
            queues.append(chosen)
        chosen.samples.append(sample)
        chosen.size += size
        done = chosen if chosen.size == self._capacity else None
        if done is None and len(queues) > _OPEN_QUEUES:
            done = queues[0]  # the oldest: of the fullest the others could wait for ever
        if done is not None:
            queues.remove(done)
        return done


def held_out_split(
    records: Sequence[Record], count: int, seed: int
) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """Split into (train, held out), the latter with `count` samples picked by the hash of seed and content.

    The pick does not depend on names, folders or the order of sets. Files of equal content stay together, so
    that nothing held out is trained on. Both parts keep the records' order. Raises DataError when impossible.
    """
    twins: dict[str, int] = {}
    for record in records:
        twins[record.content_sha256] = twins.get(record.content_sha256, 0) + 1
    held_out: set[str] = set()
    missing = count
    for content in sorted(twins, key=lambda content: _hash(seed, "held out", content)):
        if 0 < twins[content] <= missing:
            held_out.add(content)
            missing -= twins[content]
    if missing or count >= len(records):
        copies = len(records) - len(twins)
        because = f", {copies} of them copies of others" if copies else ""
        raise DataError(
            f"{count} samples cannot be held out: the sets hold {len(records)}{because}, and one must train",
            where="validation.held_out",
            remedy="hold out fewer, or add some",
        )
    train = tuple(record for record in records if record.content_sha256 not in held_out)
    return train, tuple(record for record in records if record.content_sha256 in held_out)


def _hash(seed: int, purpose: str, *parts: int | str) -> int:
    """64 well-mixed bits from the seed, what they are for, and numbers or texts."""
    text = "\x00".join([str(seed), purpose, *(str(part) for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _uniform(seed: int, purpose: str, *parts: int | str) -> float:
    """A number in [0, 1) in steps of 2^-53."""
    return (_hash(seed, purpose, *parts) >> 11) * 2.0**-53
