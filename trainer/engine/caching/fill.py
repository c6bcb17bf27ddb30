"""Encode the missing entries of the cache: text, then latents, with one kind of encoder in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer.data.leftout import capped, first_lines
from trainer.data.records import Record
from trainer.engine.caching.entries import Entries, Entry, TextEntry, precision
from trainer.engine.caching.pictures import Pictures, read_ahead, read_pictures
from trainer.engine.caching.store import MISSING, Cache
from trainer.engine.context import Context
from trainer.errors import DataError, DivergedError, Problem
from trainer.families import losses
from trainer.families.conversations import ConversationError
from trainer.families.values import EntryKind
from trainer.telemetry.progress import bars
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered

Encode = Callable[[Entry, Pictures], Mapping[str, torch.Tensor]]
"""Loaded encoders of one kind: an entry's tensors on the CPU."""
KINDS: tuple[EntryKind, ...] = ("text", "latents")
"""Order in which kinds are encoded: each one's encoders are gone before the next ones load."""
LEAST_ENTRIES = 64
"""Entries for which loading the encoders on one more rank is worth its time and memory."""
_CUT_SHOWN = 50
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FillReport:
    """Counts of entries."""

    reused: int
    encoded: int


def fill_cache(context: Context, entries: Entries, *, verify: bool = False) -> FillReport:
    """Make every entry valid: texts first, then latents, so that their encoders are never in memory together;
    entries of equal key are encoded once.

    Entries that are there keep their bytes; with `verify` their tensors are compared too. Damaged ones are
    named in a warning and encoded again. A stop request raises between two entries. Entries finished before
    an error stay valid. All ranks of a run call it: the first that has this cache looks for what is missing,
    which those share that have it too, and each returns when all is there.
    """
    encoded = 0
    distinct = {(entry.kind, entry.key): entry for entry in entries.all()}
    with bars() as advance:
        for kind in KINDS:
            wanted = [entry for entry in distinct.values() if entry.kind == kind]
            on_done = functools.partial(_tell, context, functools.partial(advance, f"caching {kind}"))
            keys, leader = set[str](), context.fills[0]
            if context.ranks.rank == leader:
                keys = _missing(context, entries.cache, wanted, on_done, verify=verify)
            keys = context.ranks.gathered(keys)[leader]
            missing = [entry for entry in wanted if entry.key in keys]
            encoded += len(missing)
            _encode_share(context, entries.cache, missing, len(wanted), on_done)
    context.ranks.meet()
    context.say(
        f"cache: {numbered(len(distinct) - encoded, 'entry was', 'entries were')} there, {encoded} encoded"
    )
    return FillReport(reused=len(distinct) - encoded, encoded=encoded)


OnDone = Callable[[int, int], None]
"""Told the number of entries of a kind that are valid, or were refused, and the number of all."""


def _tell(context: Context, advance: OnDone, done: int, total: int) -> None:
    context.status.beat(Phase.CACHE, step=done, total=total)
    advance(done, total)


def _missing(
    context: Context, cache: Cache, wanted: Sequence[Entry], on_done: OnDone, *, verify: bool
) -> set[str]:
    """Keys of the entries that are to be encoded; damaged ones are named."""
    missing: set[str] = set()
    for seen, entry in enumerate(wanted, start=1):
        context.stop.raise_if_requested()
        problem = cache.damage(entry.kind, entry.key, thorough=verify)
        if problem is None:
            on_done(seen - len(missing), len(wanted))
            continue
        missing.add(entry.key)
        if problem != MISSING:
            said = "cache entry %s of %s is damaged (%s) and is encoded again"
            _log.warning(said, cache.path(entry.kind, entry.key), entry.name, problem)
    return missing


def _encode_share(
    context: Context, cache: Cache, missing: Sequence[Entry], total: int, on_done: OnDone
) -> None:
    """Encode this rank's share of the missing entries; as many ranks work as have enough to do.

    What the others do meanwhile counts as done in proportion. Raises DataError of all conversations
    that are too long, or that the template does not write, once the others are encoded.
    """
    place, working = context.fills.index(context.ranks.rank), -(-len(missing) // LEAST_ENTRIES)
    working = min(len(context.fills), working)
    ours = missing[place::working] if place < working else ()
    if not ours:
        return
    there = told = total - len(missing)
    problems: list[Problem] = []
    read = functools.partial(read_pictures, control_size=context.family.control_size)
    with _encoders(context, ours[0].kind) as encode, contextlib.closing(read_ahead(ours, read)) as ahead:
        for number, (entry, pictures) in enumerate(ahead, start=1):
            context.stop.raise_if_requested()
            try:
                cache.write(entry.kind, entry.key, _finite(entry, encode(entry, pictures)))
            except ConversationError as error:
                assert isinstance(entry, TextEntry), "only texts are conversations"
                problems += [dataclasses.replace(one, where=entry.place) for one in error.problems]
            while told < there + number * len(missing) // len(ours):
                told += 1
                on_done(told, total)
    if problems:
        raise DataError(capped(problems))


def _finite(entry: Entry, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """`tensors`; raises DivergedError where one is not finite: cached, it would poison every later run."""
    bad = next((name for name, one in tensors.items() if not one.isfinite().all()), None)
    if bad is not None:
        what = f"encoding {entry.name} gave values in `{bad}` that are not finite"
        remedy = "encode in a wider type (model.dtype: fp32), and check the encoder's weights"
        if entry.kind == "latents":  # these are in fp32 always
            remedy = "check the VAE's weights, and the picture"
        raise DivergedError(what, where=f"{entry.kind} encoder", remedy=remedy)
    return tensors


@contextlib.contextmanager
def _encoders(context: Context, kind: EntryKind) -> Iterator[Encode]:
    """The family's encoders of one kind, on the device for as long as the block runs."""
    family, (dtype, stored) = context.family, precision(context, kind)
    context.status.beat(Phase.LOAD)
    source = dataclasses.replace(context.source, quantized_to=stored)
    tiling = context.plan.vae_tiling
    loaded = [family.load_encoders(kind, source, device=context.device, dtype=dtype, vae_tiling=tiling)]

    def encode(entry: Entry, pictures: Pictures) -> Mapping[str, torch.Tensor]:
        data = context.config.data
        if isinstance(entry, TextEntry) and family.encode_conversation is not None and not entry.prompt:
            return family.encode_conversation(
                loaded[0], entry.caption, max_sequence_length=data.max_sequence_length, learn=data.learn
            )
        if isinstance(entry, TextEntry):
            return family.encode_text(
                loaded[0],
                entry.caption,
                [*pictures.seen],
                prompt=entry.prompt,
                max_sequence_length=data.max_sequence_length,
            )
        assert pictures.pixels is not None, "the pictures of a sample"
        encoded = family.encode_pixels(loaded[0], pictures.pixels, [*pictures.controls])
        return encoded if pictures.mask is None else encoded | losses.mask_entry(pictures.mask, encoded)

    context.status.beat(Phase.CACHE)
    try:
        yield encode
    finally:
        loaded.clear()
        gc.collect()
        torch.cuda.empty_cache()  # the next phase starts from its own peak


def tell_cut_captions(context: Context, records: Sequence[Record]) -> None:
    """Warn of every caption and prompt with more tokens than `data.max_sequence_length`, with its place and
    count.

    Nothing is told of families that refuse such samples instead of cutting them.
    """
    count, limit = context.family.caption_tokens(context.source), context.config.data.max_sequence_length
    if count is None:
        return
    numbers = enumerate(context.config.validation.prompts, start=1)
    prompts = [(f"validation.prompts, prompt {number}", prompt) for number, prompt in numbers]
    tokens: dict[str, int] = {}
    cut: dict[str, dict[str, None]] = {"caption": {}, "prompt": {}}
    for kind, place, text in (
        *(("caption", str(record.path), record.caption) for record in records),
        *(("prompt", *one) for one in prompts),
    ):
        if text not in tokens:
            context.alive(Phase.LOAD)
            tokens[text] = count(text)
        if tokens[text] > limit:
            cut[kind][f"{place}: {tokens[text]} tokens"] = None
    if not any(cut.values()):
        return
    _log.warning(
        "longer than data.max_sequence_length, %d tokens: %s. The rest of them is not read\n%s",
        limit, ", ".join(numbered(len(lines), kind) for kind, lines in cut.items() if lines),
        first_lines([line for lines in cut.values() for line in lines], _CUT_SHOWN),
    )  # fmt: skip
