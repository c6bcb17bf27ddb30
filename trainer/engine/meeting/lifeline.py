"""The lifeline between hosts: each rank counts in the store, and ends where another host stops counting.

A machine that loses power, is cut off or is frozen closes no connection: whoever waits for it would wait for
ever. Two threads: one talks to the store, which may never answer; the other one looks at the clock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from trainer.errors import LostError, StoppedError, TrainerError

BEAT_SECONDS = 5.0
LOST_SECONDS = 30.0
"""Time without a word after which a rank of another host counts as lost."""
GO_ON = "start the same command again on all hosts: it goes on from its checkpoint"
_LOOK_SECONDS = 1.0
_HEARD_LOOK_SECONDS = 0.2
_STOOD_SECONDS = 10.0
"""Time without a look at the clock after which this process itself stood still."""
_GONE_SECONDS = 5.0
"""Time from a broken store to the end, in which this process itself may be at its end."""
_HEARD_SECONDS = 10.0
"""Longest time in which other hosts hear that this one was asked to stop: two of their looks."""
_MISSED = 2.4
"""Distance from a rank's last count, in BEAT_SECONDS, at which one did not come: two are usual at most, since
a rank counts, and is looked at, once in each.
"""
_LEFT, _STOPPED = "left 1", "stopped 1"
"""Last words of a rank, in place of a count: it ends as all agreed, or it was asked to stop before that."""


class Lifeline:
    """Counts for `rank`, and calls `on_end` once, on a thread of its own, when another host is lost, with a
    LostError, or says that it was asked to stop, with a StoppedError.

    `hosts` are the ranks of each other host, by its number. `waits` says whether this rank waits for others;
    `on_others_work` is called while any rank of another host does not.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        hosts: Mapping[int, Sequence[int]],
        *,
        waits: Callable[[], bool],
        on_others_work: Callable[[], None],
        on_end: Callable[[TrainerError], None],
    ) -> None:
        self._store, self._rank, self._hosts = store, rank, dict(hosts)
        self._waits, self._on_others_work, self._on_end = waits, on_others_work, on_end
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._says = threading.Lock()
        """Held while a word is said: none comes after the last one."""
        now = time.monotonic()
        self._answered = now
        self._moved = {other: now for ranks in hosts.values() for other in ranks}
        self._seen: dict[int, str] = {}
        self._left: set[int] = set()
        self._broken = ""
        self._broken_since = 0.0

    def begin(self) -> None:
        """Start to count and to look."""
        threading.Thread(target=self._talk, daemon=True, name="lifeline").start()
        threading.Thread(target=self._watch, daemon=True, name="lifeline clock").start()

    def end(self) -> None:
        """Look no more: the ranks are at the end of their run, and leave one by one."""
        self._ended.set()

    def leave(self, *, stopped: bool = False, heard: bool = False) -> None:
        """End, and say that this rank ends as all have agreed, so that others do not miss it.

        Of one that was asked to stop, or with `heard`, it waits until a rank of each other host has heard of
        the end, or ends too.
        """
        self._ended.set()
        with contextlib.suppress(RuntimeError):  # host 0 is gone, and needs to hear nothing
            with self._says:
                self._store.set(f"alive {self._rank}", _STOPPED if stopped else _LEFT)
            if stopped or heard:
                self._await_left()

    def _await_left(self) -> None:
        end = time.monotonic() + _HEARD_SECONDS
        while time.monotonic() < end and not all(map(self._has_left, self._hosts.values())):
            time.sleep(_HEARD_LOOK_SECONDS)

    def _has_left(self, ranks: Sequence[int]) -> bool:
        told = self._store.multi_get([f"alive {other}" for other in ranks])
        return any(text.decode() in (_LEFT, _STOPPED) for text in told)

    def silent(self, seconds: float | None = None) -> str:
        """Words about a host that was not heard of for so long (LOST_SECONDS); empty where there is none."""
        now, seconds = time.monotonic(), LOST_SECONDS if seconds is None else seconds
        with self._lock:
            for host, ranks in self._hosts.items():
                quiet = {other: now - self._moved[other] for other in ranks if other not in self._left}
                if not quiet:
                    continue
                longest = max(quiet, key=lambda other: quiet[other])
                if quiet[longest] > seconds and self._answered > self._moved[longest]:
                    return f"host {host} gave no sign of life for {quiet[longest]:.0f} s (rank {longest})"
            if self._broken and now - self._broken_since > _GONE_SECONDS:
                return f"host 0, where the hosts meet, is gone: {self._broken}"
            if now - self._answered > seconds:
                return f"host 0, where the hosts meet, gave no answer for {now - self._answered:.0f} s"
        return ""

    def shows_loss(self) -> bool:
        """Wait for counts of others, who may have the same error and count on; True if one is missing."""
        time.sleep(3 * BEAT_SECONDS)
        return bool(self.silent(_MISSED * BEAT_SECONDS))

    def _talk(self) -> None:
        others, count = [*self._moved], 0
        keys = [f"alive {other}" for other in others]
        while not self._ended.is_set():
            count += 1
            try:
                with self._says:
                    if self._ended.is_set():
                        return
                    self._store.set(f"alive {self._rank}", f"{count} {int(self._waits())}")
                told = [text.decode() for text in self._store.multi_get(keys)]
            except dist.DistStoreError:  # host 0 may stand still, and go on before it is lost
                continue
            except RuntimeError as error:
                with self._lock:
                    self._broken, self._broken_since = str(error).splitlines()[0], time.monotonic()
                return
            words = dict(zip(others, told, strict=True))
            if self._look_at(words):
                self._on_others_work()
            for host, ranks in self._hosts.items():
                if any(words[other] == _STOPPED for other in ranks) and not self._ended.is_set():
                    # the store ends with rank 0's process: other hosts hear the same word from it first
                    self.leave(heard=self._rank == 0)
                    self._on_end(StoppedError(f"host {host} was asked to stop", remedy=GO_ON))
                    return
            self._ended.wait(BEAT_SECONDS)

    def _look_at(self, words: Mapping[int, str]) -> bool:
        """Take in the newest words of others, by rank; True where one of them works."""
        now = time.monotonic()
        with self._lock:
            self._answered = now
            self._left = {other for other, text in words.items() if text == _LEFT}
            for other, text in words.items():
                if self._seen.get(other) != text:
                    self._seen[other], self._moved[other] = text, now
            return any(
                text.endswith(" 0") and now - self._moved[other] < LOST_SECONDS
                for other, text in words.items()
            )

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if now - before > _STOOD_SECONDS:  # this process itself stood still: others get their time again
                with self._lock:
                    self._answered = max(self._answered, now)
                    self._moved = dict.fromkeys(self._moved, now)
            before = now
            text = self.silent()
            if text and not self._ended.is_set():
                self._on_end(LostError(text, remedy=GO_ON))
                return
