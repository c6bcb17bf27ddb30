"""The signals that ask a supervisor to end its run."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from trainer.telemetry.stop import heeded

_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def kept_back() -> Iterator[None]:
    """Processes that are started in the block get these signals only once they collect them: one that comes
    before would end a Python that cannot heed it yet.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def collected() -> Iterator[list[tuple[float, int]]]:
    """Collect SIGTERM, SIGINT and SIGHUP with their times; the loop acts on them: a handler must not print.

    Afterwards they are ignored: the run has ended, and only its exit code is left to pass on. Some managers
    of processes ask several times.
    """
    received: list[tuple[float, int]] = []

    def remember(signum: int, frame: FrameType | None) -> None:
        received.append((time.monotonic(), signum))

    for signum in heeded(_ASKING):
        signal.signal(signum, remember)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING)
    try:
        yield received
    finally:
        for signum in _ASKING:
            signal.signal(signum, signal.SIG_IGN)
