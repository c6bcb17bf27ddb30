"""Time of the forward and backward passes of a step, without a wait for the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Stopwatch:
    """Time of a process' own work, without its waits; on a GPU by events, which are read a step later."""

    def __init__(self, device: str) -> None:
        self._on_gpu, self._samples, self._seconds = device != "cpu", 0, 0.0
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._before: tuple[list[tuple[torch.cuda.Event, torch.cuda.Event]], int] = ([], 0)

    @contextlib.contextmanager
    def running(self, samples: int) -> Iterator[None]:
        """Add the time of the block, which works on so many samples."""
        self._samples += samples
        if self._on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._marks.append((begin, end))
            return
        began = time.monotonic()
        yield
        self._seconds += time.monotonic() - began

    def lap(self) -> tuple[float, float]:
        """Seconds since the last call, in all and a sample, on a GPU before it, when that step's end was
        waited for; 0 without samples. Starts anew.
        """
        seconds, samples = self._seconds, self._samples
        if self._on_gpu:
            marks, samples = self._before
            seconds = 1e-3 * sum(begin.elapsed_time(end) for begin, end in marks)
            self._before, self._marks = (self._marks, self._samples), []
        self._seconds, self._samples = 0.0, 0
        return seconds, seconds / max(1, samples)
