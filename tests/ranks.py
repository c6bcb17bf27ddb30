"""Ranks of a run for tests: functions in processes that meet, and stay, since torch imports slowly."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_SECONDS = 240.0


def is_gone(pid: int) -> bool:
    """True if no process has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _work(calls: Connection) -> None:
    """A worker: joins the ranks of each call, runs its function and answers, until it is told to end."""
    import torch

    from trainer.engine import ranks

    torch.set_num_threads(1)
    while (call := calls.recv()) is not None:
        function, rank, size, place, given = call
        try:
            with ranks.joined(rank, size, place) as joined:
                answer = function(joined, *given)
            calls.send((True, answer))
        except Exception:  # whatever it is, the test is told
            calls.send((False, traceback.format_exc()))


class Workers:
    """`call(function, 2, ...)` gives what `function(Ranks, ...)` returned on each of two ranks."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.rank_imports"])
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def _start(self, size: int) -> None:
        """Start those that no call has needed before."""
        for _ in range(len(self._ends), size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def call(
        self, function: Callable[..., Any], size: int, *given: Any, place: Path | None = None
    ) -> list[Any]:
        """Answers by rank; AssertionError with the traceback of the first rank that failed."""
        self._start(size)
        with tempfile.TemporaryDirectory() as folder:
            ends = self._ends[:size]
            for rank, end in enumerate(ends):
                end.send((function, rank, size, place or Path(folder) / "meet", given))
            answers = [end.recv() if end.poll(_SECONDS) else (False, "does not answer") for end in ends]
        failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(answers) if not fine]
        if failed:
            self._forget()
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def _forget(self) -> None:
        """Kill them: after an error some may still wait for the others."""
        for process in self._processes:
            process.kill()
        self._ends, self._processes = [], []

    def end(self) -> None:
        """End the workers."""
        for end, process in zip(self._ends, self._processes, strict=True):
            with contextlib.suppress(OSError):
                end.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()


@contextlib.contextmanager
def workers() -> Iterator[Workers]:
    """Workers for the time of the block."""
    made = Workers()
    try:
        yield made
    finally:
        made.end()
