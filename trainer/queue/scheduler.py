"""The loop that starts jobs. Several at once are safe; runs go on when it ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.errors import TrainerError
from trainer.queue.launcher import ENDED, State
from trainer.queue.local import Local
from trainer.queue.turns import label
from trainer.telemetry import locks

_LOOK_SECONDS = 1.0
_PRESENT = "scheduler.lock"


def is_scheduled(folder: Path) -> bool:
    """True if a process starts the jobs of the queue in `folder`."""
    return locks.is_held(folder / _PRESENT) is True


def run(
    queue: Local,
    tell: Callable[[str], None],
    *,
    received: Sequence[object],
    drain: bool = False,
    stop_runs: bool = False,
) -> None:
    """Start jobs whose turn it is until a signal is `received`; with `drain` until none waits or runs.
    With `stop_runs` the runs that were started here then save and end before this returns; they go on by
    themselves when jobs are started again.

    `tell` is told of every start and end, and once of each trouble: what cannot be used now is tried again.
    Raises ConfigError at once for a queue that cannot be used at all.
    """
    known, trouble = {job.id: seen.state for job, seen in queue.jobs()}, ""
    queue.start_due()
    present = os.open(queue.folder / _PRESENT, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while not received:
            with contextlib.suppress(
                BlockingIOError
            ):  # one of several holds it, another after that one's end
                fcntl.flock(present, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                queue.start_due()
                known, trouble = _told(queue, known, tell), ""
            except (TrainerError, OSError) as error:
                if str(error) != trouble:
                    tell(f"warning: {error}")
                trouble = str(error)
            if drain and not trouble and all(state in ENDED | {State.HELD} for state in known.values()):
                return
            time.sleep(_LOOK_SECONDS)
        if stop_runs:
            _stop(queue, tell)
    finally:
        os.close(present)


def _stop(queue: Local, tell: Callable[[str], None]) -> None:
    """Ask the runs that this process started to save and end, and wait for them."""
    for watcher in queue.children:
        watcher.terminate()
    if queue.children:
        tell("waiting for runs to save")
    for watcher in queue.children:
        watcher.wait()


def _told(queue: Local, known: dict[int, State], tell: Callable[[str], None]) -> dict[int, State]:
    """The states now; `tell` is told of those that changed."""
    jobs = queue.jobs()
    for job, seen in jobs:
        if known.get(job.id, State.WAITING) is not seen.state:
            tell(f"{label(job)}: {seen.state}{f', {seen.words}' if seen.words else ''}")
    return {job.id: seen.state for job, seen in jobs}
