"""Floor 6: micro-batches in the run's order, read one ahead of the device."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trainer.data.sampler import MicroBatch, Sampler
from trainer.engine.context import Context
from trainer.engine.entries import Entries, load_batch
from trainer.families.protocol import Batch, Draw


@dataclass(frozen=True, kw_only=True)
class Fed:
    """One micro-batch with its randomness; the batch still on its way to the device."""

    micro_batch: MicroBatch
    batch: Batch
    draw: Draw | None


def make_sampler(context: Context, entries: Entries) -> Sampler:
    """The run's sample stream, grouped by the family's batch key with and without the caption."""
    family, config = context.family, context.config
    samples = range(len(entries.records))
    return Sampler(
        keys=[family.batch_key(*entries.headers(index, dropped=False)) for index in samples],
        dropped_keys=[family.batch_key(*entries.headers(index, dropped=True)) for index in samples],
        repeats=[record.repeats for record in entries.records],
        batch_size=config.train.train_batch_size,
        caption_dropout_rate=config.data.caption_dropout_rate,
        seed=config.train.seed,
    )


def feed(
    context: Context, entries: Entries, settings: Any, start: int, stop: int
) -> Generator[Fed, None, None]:
    """Micro-batches `start` to `stop` (not included); reading and drawing run on one thread beside the
    device.
    """
    sampler = make_sampler(context, entries)

    def prepare(number: int) -> Fed:
        micro_batch = sampler.micro_batch(number)
        samples = [(sample.record, sample.dropped) for sample in micro_batch.samples]
        header, _ = entries.headers(samples[0][0], dropped=False)
        positions = [sample.position for sample in micro_batch.samples]
        draw = context.family.draw(settings, positions, header)
        if draw is not None and context.plan.pin_memory:
            draw = Draw(**{name: tensor.pin_memory() for name, tensor in vars(draw).items()})
        batch = load_batch(entries, samples, dtype=context.dtype, pin_memory=context.plan.pin_memory)
        return Fed(micro_batch=micro_batch, batch=batch, draw=draw)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed") as pool:
        ahead = pool.submit(prepare, start) if start < stop else None
        for number in range(start, stop):
            assert ahead is not None
            current = ahead.result()
            ahead = pool.submit(prepare, number + 1) if number + 1 < stop else None
            yield current
