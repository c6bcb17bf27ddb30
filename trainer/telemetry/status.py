"""The heartbeat of a run, and the one function that judges it. Standard library only.

The training process beats into `status.json`; `trainer health`, the server and the supervisor ask `verdict`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.secrets import redacted
from trainer.errors import ExitCode, StorageError, meaning
from trainer.files import atomic
from trainer.files.json_object import is_finite
from trainer.telemetry import locks

STATUS_FILE = "status.json"
LOCK_FILE = "lock"
"""Lock file of the supervisor, and of a training process that outlives it to save."""
_log = logging.getLogger("trainer.status")
_RANK = "rank-"
_TO_BE_ENDED_SECONDS = 3.0
_MOST_RANKS = 1024
_MOST_BYTES = 1 << 16
"""Bytes that are read of a status file at most; a valid one has 300."""


class Phase(enum.StrEnum):
    """A part of a run's work, with a budget of its own for silence."""

    LOAD = "load"
    CACHE = "cache"
    FIRST_STEP = "first_step"
    TRAIN = "train"
    SAVE = "save"
    PREVIEW = "preview"
    DONE = "done"


BUDGET_SECONDS: dict[Phase, float] = {
    Phase.LOAD: 30 * 60.0,  # a beat per shard
    Phase.CACHE: 10 * 60.0,  # a beat per sample
    Phase.FIRST_STEP: 30 * 60.0,  # kernels are compiled and tuned here
    Phase.TRAIN: 5 * 60.0,  # a beat per micro-batch; or STEP_FACTOR median steps
    Phase.SAVE: 30 * 60.0,
    Phase.PREVIEW: 5 * 60.0,  # a beat per denoising step; or STEP_FACTOR median steps
}
"""Longest silence of a healthy run in each phase. DONE has none."""
STEP_FACTOR = 10.0
"""A train or preview phase may also stay silent for this many median steps: slow hardware is not hung."""
HUNG_FACTOR = 2.0
"""The supervisor kills at this many budgets."""

_OF_STEPS = frozenset({Phase.FIRST_STEP, Phase.TRAIN, Phase.SAVE})
"""Phases whose beats count optimizer steps; those of others count pictures, shards, or nothing."""
_OPTIONAL_NUMBERS = (
    "step", "total", "optimizer_step", "optimizer_steps", "median_step_seconds",
    "device_memory_reserved_peak_bytes", "exit_code",
)  # fmt: skip
_READY = frozenset({Phase.FIRST_STEP, Phase.TRAIN, Phase.SAVE, Phase.PREVIEW, Phase.DONE})
_SCALED_BY_STEP = frozenset({Phase.TRAIN, Phase.PREVIEW})


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json."""

    phase: Phase
    beat: float
    """Seconds of the monotonic clock, which all processes of one boot share."""
    beat_unix_seconds: float
    boot_id: str
    pid: int
    started_unix_seconds: float
    step: int | None = None
    total: int | None = None
    """Items of the phase that are done, and of how many."""
    optimizer_step: int | None = None
    optimizer_steps: int | None = None
    """Optimizer steps done and planned, whatever the phase; None before training begins."""
    median_step_seconds: float | None = None
    device_memory_reserved_peak_bytes: int | None = None
    """Most memory of its GPU that the process held while it loaded and trained: 0 on a CPU, None before."""
    ranks: int = 1
    """Processes of this run on this host, of which each has a status."""
    first_rank: int = 0
    """Number of the first of them among the run's."""
    waits: bool = False
    """Whether the process waits for the other ranks of its run: they are judged, not this one."""
    early_stop: str = ""
    """Why training ended before its last planned step; empty where it did not."""
    exit_code: int | None = None
    """Set by the supervisor when the training process has ended."""
    cause: str = ""
    """Why it ended, when it did not end by itself."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of a run at one moment."""

    reason: str
    healthy: bool = False
    ready: bool = False
    """Healthy and past caching."""
    budget: float | None = None
    """Seconds of silence allowed now; None when no process is expected to beat."""
    age: float | None = None
    """Seconds since the last beat."""

    @property
    def hung(self) -> bool:
        """True if the silence is long enough to kill the process."""
        return self.age is not None and self.budget is not None and self.age > HUNG_FACTOR * self.budget


KILLED = Verdict(reason="no run: its processes were killed; it can be resumed")


class StatusWriter:
    """Writes the heartbeat; a call costs a clock reading unless a second has passed or the phase changed."""

    def __init__(
        self,
        directory: Path,
        *,
        ranks: int = 1,
        first_rank: int = 0,
        interval_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        """Folder of this rank's status; of rank 0 the run's runtime folder."""
        self._path = directory / STATUS_FILE
        self._ranks = ranks
        self._first_rank = first_rank
        self._interval = interval_seconds
        self._clock = clock
        self._boot_id = locks.boot_id()
        self._started = time.time()
        self.phase: Phase | None = None
        """The phase of the last beat."""
        self.device_memory: Callable[[], int] | None = None
        """Most bytes of its GPU that this process held; set once it loads the model."""
        self.early_stop = ""
        """Why training ended before its last planned step; set where it did."""
        self._last: Status | None = None
        self._written = 0.0
        self._item_started = 0.0
        self._step: int | None = None
        self._total: int | None = None
        self._optimizer_step: int | None = None
        self._optimizer_steps: int | None = None
        self._step_seconds: deque[float] = deque(maxlen=51)
        self._median: float | None = None
        self._told = False

    def beat(
        self,
        phase: Phase,
        *,
        step: int | None = None,
        total: int | None = None,
        item_done: bool = False,
        median_step_seconds: float | None = None,
    ) -> None:
        """Say that the run is alive. `item_done`: this beat ends an optimizer step, sample, shard or such.

        The median step time is taken from the `item_done` beats of the train phase unless it is given,
        without the time that this process `waited`.
        """
        now, self._step, self._total = self._clock(), step, total
        if phase in _OF_STEPS and step is not None:
            self._optimizer_step, self._optimizer_steps = step, total or self._optimizer_steps
        changed = phase is not self.phase
        if item_done and not changed and phase is Phase.TRAIN:
            self._step_seconds.append(now - self._item_started)
        if item_done or changed:
            self._item_started = now
        if median_step_seconds is not None:
            self._median = median_step_seconds
        waited = self._last is not None and self._last.waits
        if not (changed or waited) and now - self._written < self._interval:
            return
        if median_step_seconds is None and self._step_seconds:
            self._median = statistics.median(self._step_seconds)
        self.phase = phase
        status = Status(
            phase=phase,
            beat=now,
            beat_unix_seconds=time.time(),
            boot_id=self._boot_id,
            pid=os.getpid(),
            started_unix_seconds=self._started,
            step=step,
            total=total,
            optimizer_step=self._optimizer_step,
            optimizer_steps=self._optimizer_steps,
            median_step_seconds=self._median,
            device_memory_reserved_peak_bytes=self.device_memory() if self.device_memory else None,
            ranks=self._ranks,
            first_rank=self._first_rank,
            early_stop=self.early_stop,
        )
        self._write(status)

    def wait(self) -> None:
        """Say that this process waits for the other ranks of its run, until `waited` or the next beat."""
        self._again(waits=True)

    def waited(self, seconds: float, *, told: bool) -> None:
        """Take a wait off the time of the step; say that it is over where it was `told`."""
        self._item_started += seconds
        if told:
            self._again(waits=False)

    def wait_to_be_ended(self, seconds: float = _TO_BE_ENDED_SECONDS) -> None:
        """Wait for what the supervisor does at once where another rank has ended: one rank says why."""
        self.wait()
        time.sleep(seconds)

    def _again(self, *, waits: bool) -> None:
        """Beat in the phase and step of the last beat."""
        if self._last is not None:
            now, unix = self._clock(), time.time()
            last = dataclasses.replace(self._last, step=self._step, total=self._total, waits=waits)
            last = dataclasses.replace(last, optimizer_step=self._optimizer_step)
            self._write(dataclasses.replace(last, beat=now, beat_unix_seconds=unix))

    def _write(self, status: Status) -> None:
        self._last, self._written = status, status.beat
        try:
            # programs and people tidy temporary folders
            self.directory.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self._path, _text(status), sync=False)
        except StorageError as error:
            # a full folder for status must not end a run whose results go elsewhere
            if not self._told:
                _log.warning("the heartbeat cannot be written: %s", error)
            self._told = True
            _overwrite(self._path, status)


def read_status(directory: Path) -> Status | None:
    """The status of the run in `directory`; None when there is none, it is damaged, or from another boot."""
    try:
        with (directory / STATUS_FILE).open("rb") as file:
            raw = json.loads(file.read(_MOST_BYTES))
        if not isinstance(raw, dict) or not _is_sound(raw):
            return None
        status = Status(**{**raw, "phase": Phase(raw["phase"])})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # absent, unreadable or not written by this version
    return status if status.boot_id == locks.boot_id() else None


def _is_sound(raw: dict[str, object]) -> bool:
    """True if every value can be judged: JSON may hold any type, and NaN."""
    optional = [raw.get(name) for name in _OPTIONAL_NUMBERS]
    numbers = [raw[name] for name in ("beat", "beat_unix_seconds", "started_unix_seconds", "pid")]
    ranks, before = raw.get("ranks", 1), raw.get("first_rank", 0)
    if not isinstance(ranks, int) or not 1 <= ranks <= _MOST_RANKS:
        return False
    if not isinstance(before, int) or not 0 <= before <= _MOST_RANKS:
        return False
    numbers += [value for value in optional if value is not None]
    texts = (raw.get("cause"), raw.get("early_stop", ""))
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(value, int | float) and is_finite(value) for value in numbers
    )


def rank_folder(directory: Path, rank: int) -> Path:
    """The folder of a rank's status and metrics; rank 0 has the run's own."""
    return directory / f"{_RANK}{rank}" if rank else directory


def rank_folders(directory: Path) -> list[Path]:
    """The folders of all ranks that a run in `directory` had, this one or one before, in their order."""
    named = (path.name.removeprefix(_RANK) for path in directory.glob(f"{_RANK}*"))
    others = sorted(int(name) for name in named if name.isdecimal() and str(int(name)) == name != "0")
    return [rank_folder(directory, rank) for rank in (0, *others)]


def read_ranks(directory: Path) -> list[Status | None]:
    """The statuses of all ranks of the run in `directory`, in their order, as `read_status` gives each."""
    first = read_status(directory)
    others = range(1, 1 if first is None else first.ranks)
    return [first, *(read_status(rank_folder(directory, rank)) for rank in others)]


def was_killed(directory: Path, status: Status) -> bool:
    """True if the run of this status is gone and nobody was left to write its end.

    Nobody holds the lock of `directory`, whatever process has the status' number now: in another container,
    or after a restart of this one, that is somebody else. Where one is left that holds it, as a rank that is
    stuck, the supervisor and the process of the status are gone.
    """
    if status.exit_code is not None or status.phase is Phase.DONE:
        return False
    lock = directory / LOCK_FILE
    if locks.is_held(lock) is False:
        return True
    supervisor = locks.supervisor_here(lock)
    return supervisor is not None and not locks.is_alive(supervisor) and not locks.is_alive(status.pid)


def write_end(directory: Path, *, exit_code: int, cause: str) -> None:
    """Record in `directory` that the training process has ended, keeping the phase that it ended in."""
    status = read_status(directory)
    if status is None:
        return
    phase = Phase.DONE if exit_code == ExitCode.OK else status.phase
    ended = dataclasses.replace(status, phase=phase, exit_code=exit_code, cause=cause)
    atomic.write_text(directory / STATUS_FILE, _text(ended), sync=False)


def budget_seconds(status: Status, *, scale: float = 1.0) -> float | None:
    """Seconds that a run in this phase may stay silent; None when it is done."""
    budget = BUDGET_SECONDS.get(status.phase)
    if budget is None:
        return None
    budget *= scale
    if status.phase in _SCALED_BY_STEP and status.median_step_seconds is not None:
        budget = max(budget, STEP_FACTOR * status.median_step_seconds)
    return budget


def verdict(status: Status | None, now: float, *, scale: float = 1.0) -> Verdict:
    """Judge a run at `now` (seconds of the monotonic clock); `scale` shrinks the phase budgets for tests."""
    if status is None:
        return Verdict(reason="no run: no status has been written since this machine started")
    code, where = status.exit_code, f"phase {status.phase}"
    if status.step is not None:
        where += f" {status.step}" if status.total is None else f" {status.step}/{status.total}"
    if code is not None and code != ExitCode.OK:
        return Verdict(reason=f"ended with exit code {code} in {where}: {status.cause or meaning(code)}")
    budget = budget_seconds(status, scale=scale)
    if budget is None or code == ExitCode.OK:
        early = f": {status.early_stop}" if status.early_stop else ""
        return Verdict(healthy=True, ready=True, reason=f"finished{early}")
    age = now - status.beat
    if age < 0:
        return Verdict(reason="no run: the status is from before this machine's last start")
    if age > budget:
        reason = f"no heartbeat for {age:.1f} s in {where}, budget {budget:.1f} s"
        return Verdict(reason=reason, budget=budget, age=age)
    reason = f"{where}, last heartbeat {age:.1f} s ago"
    return Verdict(healthy=True, ready=status.phase in _READY, reason=reason, budget=budget, age=age)


def verdict_of_ranks(statuses: Sequence[Status | None], now: float, *, scale: float = 1.0) -> Verdict:
    """One judgement of all ranks of a run: of the one that is behind, where one is unhealthy.

    A rank that waits for others is not judged while one of them does not. Where all of them wait, they are
    silent since the last one began to.
    """
    first = statuses[0]
    if len(statuses) == 1 or first is None or first.exit_code is not None:
        return verdict(first, now, scale=scale)
    idle = [one is None or one.waits or one.phase is Phase.DONE for one in statuses]
    working = [rank for rank in range(len(statuses)) if not idle[rank]]
    there = {rank: one for rank, one in enumerate(statuses) if one is not None}
    if not working:
        newest = max((one.beat for one in there.values() if one.waits), default=0.0)
        there = {rank: dataclasses.replace(one, beat=max(one.beat, newest)) for rank, one in there.items()}
    judged = {rank: verdict(there[rank], now, scale=scale) for rank in working or there}
    sick = [rank for rank, one in judged.items() if not one.healthy]

    def progress(rank: int) -> tuple[int, float]:
        one = statuses[rank]
        return (0, 0.0) if one is None else (one.step or 0, one.beat)

    told = min(sick, key=progress) if sick else min(judged)
    of_rank = f"rank {first.first_rank + told}: " if told or sick else ""
    ready = all(one.ready for one in judged.values())
    return dataclasses.replace(judged[told], ready=ready, reason=f"{of_rank}{judged[told].reason}")


def _text(status: Status) -> str:
    """The content of status.json, which is written without fsync: a power cut ends the process as well."""
    return redacted(json.dumps(dataclasses.asdict(status)))


def _overwrite(path: Path, status: Status) -> None:
    """Write over the old status in its own room, so that a run in a full folder is not taken for hung."""
    text = _text(status).encode()
    with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
        file.write(text.ljust(path.stat().st_size))
