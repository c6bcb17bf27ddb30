"""The process that watches one start of a job: it outlives the queue.

    python -m trainer.queue.watcher FOLDER START LOCK WORKING_FOLDER COMMAND...

It keeps the job's lock, passes on requests to stop and writes down the exit code. Where it is killed, the run
is asked to save and end. For a run that stopped (75) without such a request it leaves one, so that it is
held: what stopped it may stop it again and again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.config.interpreter import python
from trainer.errors import ExitCode
from trainer.queue import jobfiles
from trainer.telemetry.status import BUDGET_SECONDS, Phase, read_ranks
from trainer.telemetry.supervising.signals import collected

_LOOK_SECONDS = 0.2
_PATIENCE_SECONDS = BUDGET_SECONDS[Phase.SAVE] + 180.0
"""Time after which a run that was asked to end, and does not get on with saving, is killed: its supervisor
does so before, where it can.
"""


def main(arguments: Sequence[str]) -> int:
    """Run a job's command to its end; returns its exit code, as a shell reports it."""
    folder, start, lock, working_folder, *command = arguments
    return watch(Path(folder), int(start), int(lock), Path(working_folder), command)


def watch(folder: Path, start: int, lock: int, working_folder: Path, command: Sequence[str]) -> int:
    """Run `command`, which keeps the descriptor `lock`, from `working_folder`; leave its exit code in
    `folder`.
    """
    with collected() as received:
        try:
            # in a group of its own no signal reaches it but ours, and its death signal if we are killed
            child = subprocess.Popen(
                python("-m", "trainer.engine.comparing.tied", str(os.getpid()), *command),
                cwd=working_folder,
                stdin=subprocess.DEVNULL,
                process_group=0,
                pass_fds=(lock,),
            )
        except OSError as error:
            print(f"queue: the run cannot be started: {error}", file=sys.stderr, flush=True)
            code: int = ExitCode.BAD_CONFIG
        else:
            code = _ended(child, folder, start, received)
        jobfiles.write_exit(folder, start, code)
    return code


def _ended(
    child: subprocess.Popen[bytes], folder: Path, start: int, received: Sequence[tuple[float, int]]
) -> int:
    """Wait for the child's end, and pass on the first request to stop; its exit code."""
    asked: float | None = None  # by a signal, as when the machine shuts down, or through the queue
    while child.poll() is None:
        if asked is None and (received or jobfiles.asked_to_stop(folder, start)):
            asked = time.monotonic()
            child.terminate()
        if asked is not None and time.monotonic() - max(asked, _saved(folder)) > _PATIENCE_SECONDS:
            child.kill()
        time.sleep(_LOOK_SECONDS)
    if child.returncode == ExitCode.STOPPED and asked is None and not received:
        jobfiles.write_stop(folder, start)
    if child.returncode == -signal.SIGTERM and asked is not None:
        return ExitCode.STOPPED  # before it could handle the request, so before anything was to be saved
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _saved(folder: Path) -> float:
    """The monotonic time at which the job's run last said that it gets on with saving; 0.0 if never."""
    ranks = read_ranks(folder / jobfiles.RUNTIME)
    return max((one.beat for one in ranks if one is not None and one.phase is Phase.SAVE), default=0.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
