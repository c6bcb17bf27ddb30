"""Jobs that were handed to clusters, as rows of the home page.

A cluster's client can take a minute: a thread of its own asks it, seldom, and only where somebody looks.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import StorageError
from trainer.queue.clusters import records
from trainer.queue.clusters.known import overview
from trainer.queue.clusters.records import Submitted
from trainer.queue.launcher import Seen, State
from trainer.ui.looking import Look
from trainer.ui.studio import Studio, identifier
from trainer.ui.views.runs import has_page
from trainer.ui.views.state import KINDS, StateView

_PAUSE_SECONDS = 30.0
"""Time between an answer of the clusters and the next question."""
_TITLES: Mapping[str, str] = {"slurm": "Slurm", "kueue": "Kueue"}
_NOT_YET = StateView(kind="waiting", word="not known yet", detail="The cluster is being asked.")

Answer = tuple[tuple[Submitted, Seen], ...]


@dataclass(frozen=True, kw_only=True)
class ClusterRow:
    """One job of a cluster that has not finished."""

    word: str
    """Its name in `trainer queue`: `slurm-12`."""
    name: str
    place: str
    """The kind of its cluster, and its group."""
    state: StateView
    page: str
    """Path of the page of its run; empty where its folder is not seen below the studio's root."""


class Asked:
    """The states of a queue's jobs in clusters, as they were last told. Safe in threads."""

    def __init__(self, queue: Path) -> None:
        self._queue, self._lock = queue, threading.Lock()
        self._asks, self._next = False, -math.inf
        self._answer: Answer = ()

    def look(self) -> tuple[Answer, bool]:
        """The last answer, and whether another one is on its way, as it is where that was long ago. Waits for
        none.
        """
        with self._lock:
            if not self._asks and time.monotonic() >= self._next:
                self._asks = True
                threading.Thread(target=self._ask, daemon=True).start()
            return self._answer, self._asks

    def _ask(self) -> None:
        answer = self._answer
        try:
            answer = tuple(overview(self._queue))
        except StorageError:
            pass  # a record that is damaged: the page says so by itself
        finally:
            with self._lock:
                self._answer, self._asks, self._next = answer, False, time.monotonic() + _PAUSE_SECONDS


@functools.cache
def asked_of(queue: Path) -> Asked:
    """The one who asks for the queue in this folder."""
    return Asked(queue)


def cluster_look(queue: Path) -> Look:
    """A look at all that `cluster_rows` shows: it works while a cluster is asked. Raises StorageError."""
    changes = records.changes(queue)
    if changes is None:
        return Look(changes=None)
    answer, asks = asked_of(queue).look()
    return Look(changes=(changes, answer), works=asks)


def cluster_rows(studio: Studio, queue: Path) -> tuple[ClusterRow, ...]:
    """The jobs that clusters have, by their age, but those that finished. Raises StorageError for a damaged
    record.
    """
    kept = records.kept(queue) if records.changes(queue) is not None else []
    if not kept:
        return ()
    seen = {one.word: state for one, state in asked_of(queue).look()[0]}
    return tuple(_rows(studio, kept, seen))


def _rows(studio: Studio, kept: Sequence[Submitted], seen: Mapping[str, Seen]) -> list[ClusterRow]:
    found = []
    for one in kept:
        told = seen.get(one.word)
        if told is not None and told.state is State.FINISHED:
            continue
        state = _NOT_YET
        if told is not None:
            state = StateView(kind=KINDS[told.state], word=told.state.value, detail=told.words)
        place = ", ".join(filter(None, (_TITLES.get(one.launcher, one.launcher), one.group)))
        found.append(
            ClusterRow(word=one.word, name=one.name, place=place, state=state, page=_page(studio, one))
        )
    return found


def _page(studio: Studio, one: Submitted) -> str:
    run = Path(one.run)
    return f"/runs/{identifier(studio.runs, run)}" if has_page(studio, run) else ""
