"""The process beside the studio that starts the queue's jobs: `trainer queue run`, as on a command line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

from trainer.config import environment
from trainer.config.interpreter import python
from trainer.telemetry.supervising import webhook
from trainer.ui.studio import Studio
from trainer.ui.views.settings import webhook_file

LOG_FILE = "queue.log"
"""Words of that process, in the studio's folder."""
_COMMAND = ("-m", "trainer", "queue", "run")
_LOOK_SECONDS = 5.0
"""Time between two looks whether that process lives: its end is no hurry, and each look wakes the studio."""
_PAUSE_SECONDS = 15.0
"""Time between an end that nobody asked for and the next start."""
_LAST_SECONDS = 10.0


@contextlib.contextmanager
def scheduling(studio: Studio) -> Iterator[None]:
    """Have the queue's jobs started for as long as the block runs, by a process of its own, which is started
    again where it ends; others may do the same beside it. Its words go to a log in the studio's folder, and
    its runs tell their end to the studio's webhook. Runs go on after it, however it ends.
    """
    over = threading.Event()
    keeper = threading.Thread(target=_keep_running, args=(studio, over), daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def _keep_running(studio: Studio, over: threading.Event) -> None:
    """Start the process until `over` is set, again whenever it has ended, and end it then."""
    # tied to the thread that starts it, which is this one: it lives as long as the studio
    words = python("-m", "trainer.engine.comparing.tied", str(os.getpid()), *python(*_COMMAND))
    environ = environment.snapshot() | {webhook.FILE_VARIABLE: str(webhook_file(studio))}
    while not over.is_set():
        try:
            with (studio.folder / LOG_FILE).open("ab") as log:
                # in a group of its own no Ctrl-C reaches it: it is asked to end below, or by the kernel
                child = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, process_group=0
                )
        except OSError as error:  # too many processes or open files, say
            print(f"queue: no process can be started: {error}", file=sys.stderr, flush=True)
            over.wait(_PAUSE_SECONDS)
            continue
        while child.poll() is None and not over.wait(_LOOK_SECONDS):
            pass
        if child.returncode is not None:
            over.wait(_PAUSE_SECONDS)
            continue
        child.terminate()
        try:
            child.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
