"""Launchers: they start runs and say in what state each is. One protocol, for a machine and for clusters."""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.errors import GOES_ON, MEANING, ExitCode

CPU = "cpu"
"""Name of the lease of jobs that compute without a GPU: there is one, so they run one at a time."""


class State(enum.StrEnum):
    """The state of a job: derived each time it is asked for, stored nowhere."""

    WAITING = "waiting"
    HELD = "held"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    UNKNOWN = "unknown"
    """Where a cluster says something that is none of these."""


ENDED = frozenset({State.FINISHED, State.FAILED, State.LOST})
"""States that only a person ends."""
ALIVE = frozenset({State.RUNNING, State.STOPPING})


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The state of a job at one moment."""

    state: State
    words: str = ""
    """The state's cause and what follows from it; empty where the state says all."""
    exit_code: int | None = None
    """Exit code of its last start; None where it had none, or runs."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run that somebody wants, or a try of one."""

    config: str
    """Its whole configuration as YAML."""
    name: str
    group: str = ""
    """Common name of jobs that differ in the values of one key; empty for a job of its own."""
    run: Path
    """Absolute path of its run folder, the configuration's `output_dir`; of a try that of its own folder."""
    working_folder: Path
    """Folder from which relative paths of the configuration count."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs it wants, or `CPU` alone; empty for any `count` GPUs."""
    count: int = 1
    """GPUs that it takes."""
    seconds: float | None = None
    """Time that its plan predicts; None where the plan knows none."""
    pictures: int | None = None
    """Pictures that a try draws; None for a run that trains."""
    held: bool = False
    """Whether it waits until somebody releases it."""


class Launcher(Protocol):
    """Starts runs somewhere and keeps them apart. Jobs are named by the text that `submit` gave."""

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Take in all of these jobs or none; their names, in order."""
        ...

    def stop(self, job: str) -> None:
        """Ask a run to save and end; it is held then. One that has not begun is held."""
        ...

    def state(self, job: str) -> Seen:
        """The state of a job now."""
        ...

    def log(self, job: str) -> str:
        """All that its starts printed; empty before the first."""
        ...


def judged(*, alive: bool, began: bool, exit_code: int | None, held: bool, asked: bool) -> Seen:
    """The state of a job by its locks and its exit code.

    alive: a process of the run holds a lock. began, exit_code: of the start that counts now. held: somebody
    wants it not to start. asked: it was asked to stop, or ended so and nobody asked what watches it to end.
    That is held; with a machine that shuts down a run stops and goes on by itself. Nothing else is ever tried
    again by itself.
    """
    if alive:
        return Seen(state=State.STOPPING if asked else State.RUNNING, words=_alive(exit_code, asked))
    if exit_code == ExitCode.OK:
        return Seen(state=State.FINISHED, exit_code=exit_code)
    if exit_code in GOES_ON:
        if held or asked:
            words = "stopped, resumable: `trainer queue hold --release` goes on with it"
            return Seen(state=State.HELD, words=words, exit_code=exit_code)
        why = "stopped" if exit_code == ExitCode.STOPPED else "another machine was lost"
        return Seen(state=State.WAITING, words=f"{why}, goes on by itself", exit_code=exit_code)
    if exit_code is not None:
        return Seen(state=State.FAILED, words=meaning(exit_code), exit_code=exit_code)
    if began:
        words = (
            "ended without an exit code: it was killed, or the machine was; `trainer queue hold --release`"
            " goes on from its newest checkpoint"
        )
        return Seen(state=State.LOST, words=words)
    return Seen(state=State.HELD if held else State.WAITING)


def _alive(exit_code: int | None, asked: bool) -> str:
    if exit_code is not None:  # of its supervisor, which may have been killed: the run saves
        return f"ends, with exit code {exit_code}"
    return "saves, and ends" if asked else ""


def meaning(exit_code: int) -> str:
    """An exit code in words."""
    known = next((words for code, words in MEANING.items() if code == exit_code), "")
    if not known and exit_code > 128 and exit_code - 128 in set(signal.Signals):
        known = f"ended by {signal.Signals(exit_code - 128).name}"
    return f"exit code {exit_code}: {known or 'unexpected'}"
