"""Conversations of more tokens than a row has: left out or cut, as `data.on_long` says, before encoding.

A conversation that was cut is a record like one that was written so short: cache entries and fingerprints go
by what is left of it.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.data.conversations.formats import as_text
from trainer.data.leftout import capped, first_lines
from trainer.data.records import ChatRecord, LeftOut, Record
from trainer.engine.caching.samples import Samples
from trainer.engine.context import Context
from trainer.errors import DataError, Problem
from trainer.telemetry.progress import bars
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered

_SHOWN = 50
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Fitted:
    """Records that fit a row, and what became of the others, in words by place."""

    records: tuple[Record, ...]
    left_out: Mapping[str, str]
    cut: Mapping[str, str]


def fit_lengths(context: Context, samples: Samples) -> Samples:
    """The samples with none that is longer than `data.max_sequence_length`, where `data.on_long` is not
    `error`: then encoding refuses all long ones.

    Tells what is left out and cut. Raises DataError where nothing is left to train on, or to measure on. All
    ranks find the same.
    """
    make_counter, data = context.family.conversation_tokens, context.config.data
    if data.on_long == "error" or make_counter is None:
        return samples
    count = make_counter(context.source)
    with bars() as advance:
        of_held_out = functools.partial(advance, "measuring held-out conversations")
        of_training = functools.partial(advance, "measuring conversations")
        held_out = _fit(context, samples.held_out, count, of_held_out)
        training = _apart(_fit(context, samples.training, count, of_training), held_out)
    for kind, before, fitted in (
        ("trained on", samples.training, training),
        ("held out", samples.held_out, held_out),
    ):
        if before and not fitted.records:
            of = numbered(len(before), "conversation that is", "conversations that are")
            what = f"none of the {of} to be {kind} is left"
            remedy = f"raise data.max_sequence_length, which is {data.max_sequence_length}"
            rows = [Problem(what=why, where=place) for place, why in fitted.left_out.items()]
            raise DataError([Problem(what=what, where="data.on_long", remedy=remedy), *capped(rows)])
    left_out: tuple[LeftOut, ...] = (*training.left_out.items(), *held_out.left_out.items())
    _tell(context, len(samples.all), left_out, {**training.cut, **held_out.cut})
    return dataclasses.replace(
        samples,
        training=training.records,
        held_out=held_out.records,
        left_out=(*samples.left_out, *left_out),
    )


def _fit(
    context: Context,
    records: Sequence[Record],
    count: Callable[[str], int],
    on_done: Callable[[int, int], None],
) -> _Fitted:
    """The records that fit, cut where that is asked for."""
    limit, cuts = context.config.data.max_sequence_length, context.config.data.on_long == "cut"
    kept: list[Record] = []
    left_out, cut = dict[str, str](), dict[str, str]()
    for done, record in enumerate(records, start=1):
        context.alive(Phase.LOAD)
        on_done(done, len(records))
        place, tokens = str(record.path), count(record.caption)
        if tokens <= limit:
            kept.append(record)
            continue
        shorter = shortened(record.caption, count, limit) if cuts else None
        if shorter is None:
            why = "also up to its first answer" if cuts else f"{limit} are possible"
            left_out[place] = f"longer than data.max_sequence_length: {tokens} tokens, {why}"
            continue
        assert isinstance(record, ChatRecord), "only conversations have turns"
        digest = hashlib.sha256(shorter.encode()).hexdigest()
        kept.append(dataclasses.replace(record, caption=shorter, content_sha256=digest))
        messages = f"{len(json.loads(shorter))} of {len(json.loads(record.caption))} messages"
        cut[place] = f"{tokens} tokens, {messages} are kept"
    return _Fitted(records=tuple(kept), left_out=left_out, cut=cut)


def shortened(caption: str, count: Callable[[str], int], limit: int) -> str | None:
    """A conversation (JSON) without as few turns at its end as make it fit, the last message an answer; None
    where not even the first answer fits.
    """
    messages = json.loads(caption)
    ends = [number for number, message in enumerate(messages, start=1) if message["role"] == "assistant"]
    fitting = bisect.bisect_right(ends, limit, key=lambda end: count(as_text(messages[:end])))
    return as_text(messages[: ends[fitting - 1]]) if fitting else None


def _apart(training: _Fitted, held_out: _Fitted) -> _Fitted:
    """Training records without those that have become what one of `held_out` is."""
    measured = {record.content_sha256 for record in held_out.records}
    equal = {str(one.path) for one in training.records if one.content_sha256 in measured}
    return _Fitted(
        records=tuple(one for one in training.records if str(one.path) not in equal),
        left_out={**training.left_out, **dict.fromkeys(sorted(equal), "cut, it is one that is held out")},
        cut={place: what for place, what in training.cut.items() if place not in equal},
    )


def _tell(context: Context, total: int, left_out: Sequence[LeftOut], cut: Mapping[str, str]) -> None:
    """Tell both in the log."""
    if not context.ranks.first:
        return
    asked, limit = context.config.data.on_long, context.config.data.max_sequence_length
    for what, rows in (("left out", dict(left_out)), ("cut", cut)):
        if rows:
            _log.warning(
                "data.on_long is %s: of %d conversations %d %s %s, for rows of %d tokens\n%s",
                asked, total, len(rows), "is" if len(rows) == 1 else "are", what, limit,
                first_lines([f"{place}: {why}" for place, why in rows.items()], _SHOWN),
            )  # fmt: skip
