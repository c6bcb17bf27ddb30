"""Times in which a process waits for others of its run: told to its status, and taken off its steps."""

from __future__ import annotations

import threading
import time

from trainer.telemetry.status import StatusWriter

_TOLD_SECONDS = 1.0


class Waits:
    """Tells a status when this process waits for others for longer than a moment, and when it goes on.

    A thread looks once a second, so that the many short waits of a step cost no writing. The time of all
    waits is taken off the step's.
    """

    def __init__(self, status: StatusWriter) -> None:
        self._status, self._lock, self._ended = status, threading.Lock(), threading.Event()
        self._since: float | None = None
        self._told = False
        """Whether the status says that this process waits now."""
        threading.Thread(target=self._watch, daemon=True, name="waits").start()

    def __enter__(self) -> None:
        with self._lock:
            self._since, self._told = time.monotonic(), False

    def __exit__(self, *_: object) -> None:
        with self._lock:
            assert self._since is not None
            waited, self._since = time.monotonic() - self._since, None
            self._status.waited(waited, told=self._told)

    def _watch(self) -> None:
        while not self._ended.wait(_TOLD_SECONDS):
            with self._lock:
                waits = self._since is not None and time.monotonic() - self._since >= _TOLD_SECONDS
                if waits and not self._told:  # once: ranks that wait for each other for ever fall silent
                    self._status.wait()
                    self._told = True

    def now(self) -> bool:
        """Whether the status says so now."""
        return self._told and self._since is not None

    def still(self) -> None:
        """Say again that this process waits, where it was told: for ranks of other hosts, which work."""
        with self._lock:
            if self.now():
                self._status.wait()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
