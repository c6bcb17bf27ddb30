"""The process beside the studio that starts the queue's jobs: `trainer queue run`, as on a command line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trainer.config.interpreter import python

LOG_FILE = "queue.log"
"""Log of that process, in the studio's folder."""
_LOOK_SECONDS = 0.5
_AGAIN_SECONDS = 30.0
_LAST_SECONDS = 10.0


@contextlib.contextmanager
def scheduling(folder: Path) -> Iterator[None]:
    """Have the queue's jobs started for as long as the block runs, by a process of its own, whoever else does
    so. One that ends by itself is started again. Its words go to a log in `folder`. Runs go on after it,
    however it ends.
    """
    with (folder / LOG_FILE).open("ab") as log:
        over = threading.Event()
        # the kernel ends the process with the thread that started it
        keeper = threading.Thread(target=_keep, args=(log, over))
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join()


def _keep(log: BinaryIO, over: threading.Event) -> None:
    """Keep the process running until it is `over`."""
    while not over.is_set():
        try:
            _run(log, over)
        except OSError as error:
            log.write(f"queue: no process can be started: {error}\n".encode())
            log.flush()
        over.wait(_AGAIN_SECONDS)


def _run(log: BinaryIO, over: threading.Event) -> None:
    """Run the process until it ends, or it is `over`."""
    tied = ("-m", "trainer.engine.comparing.tied", str(os.getpid()))
    # in a group of its own no Ctrl-C of the terminal reaches it: it is asked below, or by the kernel
    child = subprocess.Popen(
        python(*tied, *python("-m", "trainer", "queue", "run")),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        process_group=0,
    )
    while child.poll() is None and not over.wait(_LOOK_SECONDS):
        pass
    child.terminate()
    try:
        child.wait(_LAST_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
