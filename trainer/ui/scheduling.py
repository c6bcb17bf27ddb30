"""The process beside the studio that starts the queue's jobs: `trainer queue run`, as on a command line."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from trainer.config import environment
from trainer.config.interpreter import python
from trainer.queue.scheduler import is_scheduled

LOG_FILE = "queue.log"
"""Words of that process, in the studio's folder."""
_LAST_SECONDS = 10.0


@contextlib.contextmanager
def scheduling(folder: Path) -> Iterator[None]:
    """Have the queue's jobs started for as long as the block runs, by a process of its own; by none where one
    does that already. Its words go to a log in `folder`. Runs go on after it, however it ends.
    """
    if is_scheduled(environment.queue_dir().absolute()):
        yield
        return
    tied = ("-m", "trainer.engine.comparing.tied", str(os.getpid()))
    with (folder / LOG_FILE).open("ab") as log:
        # in a group of its own no Ctrl-C of the terminal reaches it: it is asked below, or by the kernel
        child = subprocess.Popen(
            python(*tied, *python("-m", "trainer", "queue", "run")),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    try:
        yield
    finally:
        child.terminate()
        try:
            child.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
