"""The micro-batches of each optimizer step in the run's order, made ahead of the device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.records import Record
from trainer.data.sampler import MicroBatch, Sampler
from trainer.engine.ahead import in_turn
from trainer.engine.caching.batches import draw_for, load_batch, row_tokens
from trainer.engine.caching.entries import Entries, TextEntry
from trainer.engine.caching.store import Cache
from trainer.engine.context import Context
from trainer.engine.training.graphs import OF_ONE_PICTURE
from trainer.errors import OutOfMemoryError, TrainerError
from trainer.families.values import Batch, Draw, Header
from trainer.planning.shapes.mix import padded_length
from trainer.telemetry.status import Phase
from trainer.words.sizes import GIB

# reading, random numbers and copies leave the interpreter to others: two threads make nearly twice as much
_THREADS = 2
_AHEAD = 4
# steps that are passed over between two beats
_REPLAYED = 100
# samples whose steps are counted for the line about all steps
_COUNTED = 4000


@dataclass(frozen=True, kw_only=True)
class Fed:
    """One micro-batch with its randomness; the batch still on its way to the device."""

    micro_batch: MicroBatch
    weight: float
    """Its share of the step's divisor, as `Batch.weight`."""
    tokens: int
    batch: Batch | None
    """None for a micro-batch of another rank, and where there is a problem."""
    draw: Draw | None
    problem: TrainerError | None = None
    """Why it could not be read, where several ranks have to end together."""
    spare: bool = False
    """True for one that was taken already, and counts for nothing: it is there for a rank that has no other,
    where all pass through the model together."""


def make_sampler(context: Context, entries: Entries) -> Sampler:
    """The run's steps, parted by the family's batch key with and without the caption."""
    family, config = context.family, context.config
    count = len(entries.records)
    latents = [entries.headers[one.key] for one in entries.latents] or [{}] * count
    texts = _text_headers(context, entries, entries.texts)
    empties = _text_headers(context, entries, entries.empties) or texts
    sizes, row_size = [1] * count, 1
    if family.packed_by is not None:
        sizes = [header[family.packed_by][0] for header in texts]
        row_size = config.data.max_sequence_length
    keys = [family.batch_key(*pair) for pair in zip(latents, texts, strict=True)]
    dropped_keys = [family.batch_key(*pair) for pair in zip(latents, empties, strict=True)]
    return sampler_of(context, entries.records, keys, dropped_keys, sizes, row_size)


def sampler_of(
    context: Context,
    records: Sequence[Record],
    keys: Sequence[Hashable],
    dropped_keys: Sequence[Hashable],
    sizes: Sequence[int],
    row_size: int,
) -> Sampler:
    """The run's steps of records with these keys and sizes, as `Sampler` takes them."""
    config, plan = context.config, context.plan
    return Sampler(
        keys=keys,
        dropped_keys=dropped_keys,
        repeats=[record.repeats for record in records],
        contents=[record.content_sha256 for record in records],
        sizes=sizes,
        row_size=row_size,
        rows=plan.micro_batch_size * plan.accumulation_steps,
        rows_at_once=plan.micro_batch_size,
        caption_dropout_rate=config.data.caption_dropout_rate,
        seed=config.train.seed,
    )


def _text_headers(context: Context, entries: Entries, texts: Sequence[TextEntry]) -> list[Header]:
    """Shapes of text entries as they are batched: padded where the plan pads captions."""
    headers, caption = [entries.headers[one.key] for one in texts], context.family.caption
    if not context.plan.text_padding or context.family.packed_by is not None:
        return headers
    assert caption is not None, "a family whose captions are padded as they are encoded"
    return [{**one, caption: (padded_length(one[caption][0]), *one[caption][1:])} for one in headers]


def parted(sampler: Sampler, steps: int) -> str:
    """The number of micro-batches in a step and of samples in these, in words; counted in the first steps."""
    counted = min(steps, max(1, _COUNTED // sampler.rows))
    made = [len(one) for step in range(counted) for one in sampler.step(step)]
    each = "1 sample" if max(made) == 1 else f"{max(made)} samples"
    each = each if min(made) == max(made) else f"{min(made)} to {each}"
    per_step = f"{len(made) / counted:.1f} micro-batches a step, of {each}"
    return f"samples of a step that are of one shape are computed together: {per_step}"


def filled(context: Context, entries: Entries, sampler: Sampler, steps: int) -> str:
    """The share of padded rows that is padding, in words; counted in the first steps."""
    family, size = context.family, row_tokens(context)
    assert family.packed_by is not None, "rows of several samples"
    sizes = [entries.headers[one.key][family.packed_by][0] for one in entries.texts]
    counted = min(steps, max(1, _COUNTED // sampler.rows))
    made = [sum(sizes[sample.record] for sample in one) for n in range(counted) for one in sampler.step(n)]
    share, whole = 1 - sum(made) / (len(made) * size), f"{size:,}".replace(",", " ")
    return f"rows are padded to {whole} tokens: {share:.1%} of them is padding in the first {counted} steps"


def varies(context: Context, entries: Entries) -> tuple[str, ...]:
    """Sizes that differ among the run's micro-batches (arguments of `small_forward`), captions and rows as
    they are padded; none where no block is compiled, to which it does not matter.
    """
    plan, packed = context.plan, context.family.packed_by is not None
    if not plan.compile:
        return ()
    # shapes of pictures, without the tensors of picture size that only some samples have
    latents = [
        {name: shape for name, shape in entries.headers[one.key].items() if name not in OF_ONE_PICTURE}
        for one in entries.latents
    ]
    texts = _text_headers(context, entries, [*entries.texts, *entries.empties])
    pictures = ("wide", "tall") if any(one != latents[0] for one in latents) else ()
    differ = not plan.text_padding if packed else any(one != texts[0] for one in texts)
    captions = ("text",) if differ else ()
    # the rest of a bucket makes smaller batches
    return (*pictures, *captions, *(("batch",) if plan.micro_batch_size > 1 and not packed else ()))


def keep_bytes(context: Context, entries: Entries) -> int:
    """Room for entries that stay in memory, as the plan has it.

    Raises OutOfMemoryError where all of them are asked for and do not fit.
    """
    room = context.plan.keep_bytes
    if context.config.data.cache_in_memory is not True:
        return room
    needed = entries.cache.held_bytes({(one.kind, one.key) for one in entries.all()})
    if needed > room:
        raise OutOfMemoryError(
            f"all entries of the cache take {needed / GIB:.2f} GiB in memory, "
            f"the plan leaves {room / GIB:.2f} GiB for them",
            where="data.cache_in_memory",
            remedy="write auto: what does not fit is read from the disk",
        )
    return needed


def _prepared(
    context: Context, entries: Entries, settings: Any, number: int, micro_batch: MicroBatch, *, spare: bool
) -> Fed:
    """Micro-batch `number` of a step: read and drawn for if it is this rank's, else its counts alone.

    Raises what reading raises; of several ranks a TrainerError is its problem.
    """
    ours, plan = number % context.ranks.size == context.ranks.rank, context.plan
    weight, tokens, batch, draw = float(len(micro_batch)), 0, None, None
    try:
        if ours or context.family.packed_by is not None:  # pictures weigh one each, whatever is in them
            samples = [(sample.record, sample.dropped) for sample in micro_batch]
            pin_memory = plan.pin_memory and ours
            batch = load_batch(
                context, entries, samples, pin_memory=pin_memory, text_padding=plan.text_padding
            )
            weight, tokens = batch.weight, batch.tokens
        if ours and batch is not None:
            draw = draw_for(context.family, batch, settings, [one.position for one in micro_batch])
    except TrainerError as error:
        if context.ranks.size == 1:
            raise
        return Fed(
            micro_batch=micro_batch,
            weight=weight,
            tokens=0,
            batch=None,
            draw=None,
            problem=error,
            spare=spare,
        )
    if draw is not None and plan.pin_memory:
        draw = Draw(**{name: tensor.pin_memory() for name, tensor in vars(draw).items()})
    return Fed(
        micro_batch=micro_batch,
        weight=weight,
        tokens=tokens,
        batch=batch if ours else None,
        draw=draw,
        spare=spare,
    )


def _in_rounds(context: Context, step: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
    """The micro-batches of a step, False with each, and where all ranks pass through the model together the
    last one again, True with it, for every rank that has none in the last round.
    """
    made = [(micro_batch, False) for micro_batch in step]
    spare = -len(step) % context.ranks.size if context.plan.in_rows else 0
    return [*made, *[(step[-1], True)] * spare]


def feed(
    context: Context, entries: Entries, settings: Any, start: int, stop: int
) -> Generator[tuple[Fed, ...], None, None]:
    """The micro-batches of steps `start` to `stop` (not included), a tuple a step.

    Micro-batch n of a step is that of rank n mod N; of those of others there are counts only.

    Reading and drawing run on threads beside the device. An entry that is read stays in memory while there
    is room. What reading raises is raised in its step's turn, or is told with its micro-batch.
    """
    sampler = make_sampler(context, entries)
    if context.plan.micro_batch_size > 1 and context.family.packed_by is None:
        context.say(parted(sampler, stop))
    if context.plan.text_padding and context.family.packed_by is not None:
        context.say(filled(context, entries, sampler, stop))
    cache = Cache(entries.cache.directory, context.family.name, keep_bytes=keep_bytes(context, entries))
    kept = dataclasses.replace(entries, cache=cache)
    prepare = functools.partial(_prepared, context, kept, settings)
    for passed in range(0, start, _REPLAYED):  # of long rows in large steps this takes minutes
        sampler.step(passed)
        context.status.beat(Phase.FIRST_STEP, step=start, total=stop)
        if context.ranks.size == 1:  # several end together
            context.stop.raise_if_requested()
    # the sampler is asked here, in order: it replays from the start for a step that it has passed
    work = (
        (number == len(step) - 1, functools.partial(prepare, number, micro_batch, spare=spare))
        for step in (_in_rounds(context, sampler.step(number)) for number in range(start, stop))
        for number, (micro_batch, spare) in enumerate(step)
    )
    made: list[Fed] = []
    with contextlib.closing(in_turn(work, threads=_THREADS, ahead=_AHEAD, name="feed")) as prepared:
        for ends_step, fed in prepared:
            assert fed is not None, "work of every micro-batch"
            made.append(fed)
            if ends_step:
                yield tuple(made)
                made.clear()
