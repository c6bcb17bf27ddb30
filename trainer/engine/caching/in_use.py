"""Entries that a run may read, which no prune of the same cache removes while it lives.

Each process that reads entries holds the lock of its family's folder together with the others; a prune takes
it alone, or removes nothing.
"""

from __future__ import annotations

import contextlib
import logging

from trainer.engine.caching.entries import Entries
from trainer.engine.caching.store import Cache, prune, unused
from trainer.engine.context import Context
from trainer.telemetry import locks
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered
from trainer.words.sizes import GIB

LOCK_FILE = ".in-use.lock"
_log = logging.getLogger(__name__)


def reading(context: Context) -> contextlib.AbstractContextManager[None]:
    """Keep the entries of the run's family from a prune for as long as the block runs; waits for one that is
    at work. A cache that takes no lock keeps no run from its work.
    """
    folder = Cache(context.cache_dir, context.family.name).folder
    told: list[str] = []

    def on_wait() -> None:
        if not told:
            told.append(f"waiting for a prune of {folder}")
            context.say(told[0])
        context.alive(Phase.LOAD)

    return locks.using(folder / LOCK_FILE, on_wait)


def prune_unused(context: Context, entries: Entries) -> None:
    """Remove the family's entries that are not among these, or say that they stay since another run reads
    the cache.
    """
    folder, keep = entries.cache.folder, {entry.key for entry in entries.all()}
    with locks.alone(folder / LOCK_FILE) as held:
        if held is None:
            _log.warning("%s: its lock cannot be taken: runs that read this cache now are not seen", folder)
        # beside another run nothing is removed: it may write an entry while this one looks
        left, files, size = (len(unused(folder, keep)), 0, 0) if held is False else (0, *prune(folder, keep))
    told = f"pruned {numbered(files, 'file')}, {size / GIB:.2f} GiB"
    if left:
        verb = "stays" if left == 1 else "stay"
        told = (
            f"{numbered(left, 'entry', 'entries')} that this run does not use {verb}: another run uses this"
            " cache now; prune again once it has ended"
        )
    context.say(told)
