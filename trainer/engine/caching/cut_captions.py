"""Captions that the text encoder will cut, told before it loads."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trainer.data.records import Record
from trainer.engine.context import Context
from trainer.errors import one_line
from trainer.telemetry.status import Phase

_SHOWN = 50
_log = logging.getLogger(__name__)


def tell_cut_captions(context: Context, records: Sequence[Record]) -> None:
    """Warn of every caption with more tokens than `data.max_sequence_length`, with its file and count.

    Nothing is told of families that refuse such samples instead of cutting them.
    """
    count, limit = context.family.caption_tokens(context.source), context.config.data.max_sequence_length
    if count is None:
        return
    tokens: dict[str, int] = {}
    lines: dict[str, None] = {}
    for record in records:
        context.stop.raise_if_requested()
        if record.caption not in tokens:
            tokens[record.caption] = count(record.caption)
            context.status.beat(Phase.LOAD)
        if tokens[record.caption] > limit:
            lines[f"{record.path}: {tokens[record.caption]} tokens"] = None
    if not lines:
        return
    shown = [one_line(line) for line in list(lines)[:_SHOWN]]
    hidden = len(lines) - len(shown)
    _log.warning(
        "%d caption%s than data.max_sequence_length, %d tokens: the rest is not read\n%s",
        len(lines), " is longer" if len(lines) == 1 else "s are longer", limit,
        "\n".join([*shown, *([f"... and {hidden} more"] if hidden else [])]),
    )  # fmt: skip
