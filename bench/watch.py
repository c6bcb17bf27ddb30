"""What is seen of a run from outside: when its first step was logged, and device memory in use. No torch."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

from bench import machine

_PAUSE_SECONDS = 0.25
# asking the driver takes its lock: seldom enough not to be seen in a step
_MEMORY_EVERY = 8


class Watch:
    """A thread that looks while the block of its `with` statement runs."""

    def __init__(self, log: Path, *, memory: bool = False) -> None:
        self.first_step_seconds: float | None = None
        """From the start until the log had a line, to a quarter of a second; None where it never had."""
        self.device_gib: float | None = None
        """Most memory of the GPU in use, by the driver, asked every two seconds; None if it was not asked."""
        self._log, self._memory = log, memory
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        looked = 0
        while not self._done.wait(_PAUSE_SECONDS):
            if self.first_step_seconds is None and self._log.is_file() and self._log.stat().st_size:
                self.first_step_seconds = time.monotonic() - self._started
            if self._memory and looked % _MEMORY_EVERY == 0:
                self._ask()
            looked += 1

    def _ask(self) -> None:
        found = machine.read_gpu()
        if found is not None and found[0].used_mib is not None:
            self.device_gib = max(self.device_gib or 0.0, found[0].used_mib / 1024)
