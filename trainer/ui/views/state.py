"""State of a run in words: what it does or how it ended, and what to do about that."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import GOES_ON, ExitCode
from trainer.queue.launcher import State as JobState
from trainer.telemetry.run_folder.process import PROCESS_FILE, Process, is_running, read_process
from trainer.telemetry.rundir import CONFIG_FILE, LOCK_FILE
from trainer.telemetry.runs import Run, State, heartbeats
from trainer.telemetry.sinks.records import METRICS_LOG
from trainer.telemetry.status import STATUS_FILE, Phase, verdict_of_ranks
from trainer.ui.looking import Look

LOG_FILE = "log.jsonl"
_WATCHED = (METRICS_LOG, LOG_FILE, CONFIG_FILE, "plan.json", "samples", "checkpoints", "lora", "best")
_RECORDS_KEPT = 4096
KINDS: Mapping[JobState, str] = {
    JobState.WAITING: "waiting", JobState.HELD: "paused", JobState.UNKNOWN: "paused",
    JobState.RUNNING: "running", JobState.STOPPING: "running",
    JobState.FINISHED: "good", JobState.FAILED: "bad", JobState.LOST: "bad",
}  # fmt: skip
"""Icon and colour of each state of a job."""
PHASES: Mapping[Phase, str] = {
    Phase.LOAD: "loading the base",
    Phase.CACHE: "encoding pictures and captions",
    Phase.FIRST_STEP: "first step",
    Phase.TRAIN: "training",
    Phase.PREVIEW: "drawing previews",
    Phase.SAVE: "saving",
    Phase.DONE: "done",
}
REMEDIES: Mapping[int, str] = {
    ExitCode.BAD_DATA: "Correct the files that are named, or have data.on_bad_file leave them out; resume.",
    ExitCode.HARDWARE: "Plan it again: what fits here is offered there.",
    ExitCode.DIVERGED: "Lower train.learning_rate, or look at the files that are named; then resume.",
    ExitCode.OUT_OF_MEMORY: "End other programs, or take what the log proposes to save memory; then resume.",
    ExitCode.NO_SPACE: "Make room on the disk or let this user write there; then resume.",
    ExitCode.HUNG: "Look at the last lines of the log; then resume.",
    ExitCode.STOPPED: "Resume continues from the last checkpoint.",
    ExitCode.PEER_LOST: "Start the same command again on all machines: it goes on from its last checkpoint.",
    ExitCode.NO_ACCESS: "Accept the model's licence and give a token, or name a folder that holds it.",
    ExitCode.BAD_CONFIG: "Correct the settings that are named; then start again.",
}
"""Remedy of each exit code but 0, where its problems bring none."""
UNKNOWN_END = "Look at the last lines of the log; what was saved can be resumed."
_SIGNALS = 128


@dataclass(frozen=True, kw_only=True)
class StateView:
    """A state as word, icon and colour."""

    kind: str
    """`good`, `waiting`, `paused`, `bad`, or `running`, also with `waiting` or `bad` behind it."""
    word: str
    detail: str = ""
    """More in a sentence; empty where the word says all."""

    @property
    def ended(self) -> bool:
        """True where no process works on it."""
        return not self.kind.startswith("running")


def state_view(run: Run) -> StateView:
    """The state of a run at the time it was read."""
    if run.state is State.RUNNING:
        return _running(run)
    if run.state in (State.FINISHED, State.FINISHED_EARLY):
        return StateView(kind="good", word=run.state.value, detail=run.early_stop)
    if run.end is None:
        word = "stopped" if run.state is State.RESUMABLE else "not begun"
        return StateView(kind="paused", word=word, detail="How it ended is not recorded.")
    code = run.end.exit_code
    if code is None:
        return StateView(kind="bad", word="lost", detail=run.end.meaning)
    if code in GOES_ON:
        return StateView(kind="paused", word="stopped", detail=run.end.cause or run.end.meaning)
    return StateView(kind="bad", word=f"failed ({code})", detail=run.end.meaning)


def _running(run: Run) -> StateView:
    if run.health is None or run.phase is None:
        return StateView(kind="running", word="running", detail="Its heartbeat cannot be seen from here.")
    word = PHASES[run.phase]
    if run.health.hung:
        return StateView(kind="running bad", word="hung", detail=run.health.reason)
    if not run.health.healthy:
        return StateView(kind="running waiting", word="silent", detail=run.health.reason)
    return StateView(kind="running", word=word)


def remedy(exit_code: int | None) -> str:
    """Words for what to do after an exit code; of one that no trainer gives, and of none, as well."""
    if exit_code is None:
        return UNKNOWN_END
    if exit_code > _SIGNALS:
        return f"Signal {exit_code - _SIGNALS} from outside ended it. {UNKNOWN_END}"
    return REMEDIES.get(exit_code, "" if exit_code == ExitCode.OK else UNKNOWN_END)


def run_look(folder: Path) -> Look:
    """A look at all that a run's page shows; it works where a process trains in it."""
    changes = signature(folder)
    return Look(changes=changes, works=changes[0] is True)


def row_look(folder: Path) -> Look:
    """A look at all that the list shows of a run: of one that has ended few files are enough, as whatever
    begins in it takes its lock and then writes process.json anew. Asked of each run at each look of the home
    page.
    """
    written = _stamp(f"{folder}/{PROCESS_FILE}")
    process = None if written is None else _process(folder, written)
    if written is None or process is None or process.exit_code is None:
        return run_look(folder)
    locked = _stamp(f"{folder}/{LOCK_FILE}")
    if locked is not None and locked[0] >= written[0]:  # after that end: it is held, or was until a refusal
        return run_look(folder)
    files = (_stamp(f"{folder}/{name}") for name in (METRICS_LOG, LOG_FILE))
    return Look(changes=(written, locked, _stamp(str(folder)), *files))


def signature(folder: Path) -> tuple[object, ...]:
    """A value that changes whenever a run's page would: whether it runs, sizes and times of its files, its
    heartbeat, and whether that of one of its ranks is late.
    """
    stamps: list[object] = [_stamp(f"{folder}/{name}") for name in _WATCHED]
    written = _stamp(f"{folder}/{PROCESS_FILE}")
    process = None if written is None else _process(folder, written)
    running = is_running(folder, process)
    stamps.append(written)
    if running and process is not None:
        stamps.append(_stamp(f"{process.runtime_dir}/{STATUS_FILE}"))
        if statuses := heartbeats(process):
            verdict = verdict_of_ranks(statuses, time.monotonic())
            stamps += [verdict.healthy, verdict.hung]
    return (running, *stamps)


@functools.lru_cache(maxsize=_RECORDS_KEPT)
def _process(folder: Path, written: tuple[int, ...]) -> Process | None:
    """The record of a process, which is read anew when another one was `written`."""
    return read_process(folder)


def _stamp(path: str) -> tuple[int, ...] | None:
    """Time of its last change, size, and number of a file or folder; None without one."""
    try:
        found = os.stat(path)  # noqa: PTH116  a Path costs more than the question
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
