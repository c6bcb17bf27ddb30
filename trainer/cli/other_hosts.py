"""Word to the other hosts of a run, which may wait for this one, that its start has ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from trainer.cli.output import say
from trainer.config import environment
from trainer.config.hosts import Hosts
from trainer.errors import ExitCode, TrainerError
from trainer.telemetry import locks
from trainer.telemetry.status import LOCK_FILE

TELL_SECONDS = 120.0
"""Longest time in which others are told of an error: they may still plan, or read their data."""
_TELL_STOP_SECONDS = 10.0
"""The same for a stop, after which whoever asked for it waits."""
_KILLED_BY_CTRL_C = 130
"""Exit code of a second Ctrl-C, which is a stop for other hosts."""


@contextlib.contextmanager
def telling(hosts: Hosts) -> Iterator[None]:
    """Tell the other hosts of an error in the block."""
    try:
        yield
    except TrainerError as error:
        tell_end(hosts, error.exit_code, error.problems[0].what)
        raise


def tell_end(hosts: Hosts, exit_code: int, what: str) -> None:
    """Tell the other hosts, where there are any, that this one has ended before it met them.

    Host 0 is where all meet: it waits there until all have come and heard it, the others until it is there.
    SIGTERM and Ctrl-C end that. A second start beside a run that has this host's runtime folder tells nobody:
    that run may be the one for which they wait.
    """
    if not hosts.several:
        return
    whom = "the other hosts" if hosts.number == 0 else "host 0"
    if locks.is_held(environment.runtime_dir() / LOCK_FILE):
        say(f"{whom}: not told, since a run here goes on", err=True)
        return
    if exit_code == _KILLED_BY_CTRL_C:
        exit_code = ExitCode.STOPPED
    seconds = _TELL_STOP_SECONDS if exit_code == ExitCode.STOPPED else TELL_SECONDS
    say(
        f"host {hosts.number} ends: {what}; telling {whom}, up to {seconds:.0f} s (Ctrl-C: no more)", err=True
    )
    try:
        with _interruptible():
            told = _announced(hosts, exit_code, what, seconds)
    except KeyboardInterrupt:
        told = "not all were told: asked to end"
    say(f"{whom}: {told}", err=True)


def _announced(hosts: Hosts, exit_code: int, what: str, seconds: float) -> str:
    """Tell it by a library that may be what is broken here; gives what came of it."""
    try:
        from trainer.engine.meeting.meeting import Meeting, announce
    except (ImportError, OSError) as error:
        return f"not told: torch cannot be imported here: {error}"
    meeting = Meeting(
        hosts=hosts.count,
        host=hosts.number,
        address=hosts.address,
        port=hosts.port,
        introduction={},
        tell=lambda text: None,
    )
    try:
        heard = announce(meeting, exit_code, what, seconds)
    except RuntimeError as error:
        return f"not told at {hosts.meeting}: {str(error).splitlines()[0]}"
    return "told" if heard else "not all were told; see whether they wait for this one"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Have SIGTERM and Ctrl-C end the block with KeyboardInterrupt; afterwards only the exit code is left."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    asking = (signal.SIGTERM, signal.SIGINT)
    for signum in asking:
        signal.signal(signum, end)
    try:
        yield
    finally:
        for signum in asking:
            signal.signal(signum, signal.SIG_IGN)
