"""The end of a host before all have met: its word in the store, and the error that the others make of it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from trainer.errors import ExitCode, LostError, StoppedError, TrainerError, one_line

_LONGEST = 300
"""Letters of a word: whoever reaches the store may write one."""
_CODE = re.compile(r"\d{1,3}")
_LOOK_SECONDS = 0.2


def say_end(store: Any, host: int, exit_code: int, what: str) -> None:
    """Leave word that a host has ended, and by what."""
    store.set(f"problem {host}", f"{int(exit_code)} {what}")


def end_of(store: Any, host: int) -> TrainerError | None:
    """The error that another host's end is here; None where it has left no word."""
    if not store.check([f"problem {host}"]):
        return None
    told, _, what = store.get(f"problem {host}").decode(errors="replace").partition(" ")
    code, what = told if _CODE.fullmatch(told) else "unknown", one_line(what)[:_LONGEST]
    if code == str(int(ExitCode.STOPPED)):
        what = f"host {host} was asked to stop before the hosts had met"
        return StoppedError(what, remedy="start the same command again on all hosts to go on")
    what = f"host {host} could not start: {what} (exit code {code})"
    return LostError(what, remedy="see what it says there, and start all again")


def await_heard(store: Any, hosts: Sequence[int], seconds: float) -> bool:
    """Wait until the hosts have seen what ends them, or have ended by themselves; True once all have.

    The store ends with the process that serves it.
    """
    end = time.monotonic() + seconds
    while not all(_is_over(store, host) for host in hosts):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _is_over(store: Any, host: int) -> bool:
    return bool(store.check([f"told {host}"]) or store.check([f"problem {host}"]))
