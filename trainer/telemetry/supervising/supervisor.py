"""The parent of the training process, or of several, the ranks of one run: starts them, passes signals on,
watches them, says why they ended.

It knows nothing of training and never imports torch. A child beats by `StatusWriter`. The first rank that
ends otherwise than well ends all of them, with its exit code. Where a launcher started a parent for each
rank, that of rank 0 judges all ranks, and each ends its own when another one's status has an exit code.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trainer
from trainer.config.environment import LOOPBACK
from trainer.errors import ConfigError, ExitCode, StorageError
from trainer.telemetry import control, status, stop
from trainer.telemetry.control import Order
from trainer.telemetry.status import Phase, StatusWriter, Verdict
from trainer.telemetry.supervising import cause_of_death, memory_floor, server
from trainer.telemetry.supervising.others import Others
from trainer.telemetry.supervising.runtime_folder import RUNTIME_DIR_VARIABLE, forget, holding, say
from trainer.telemetry.supervising.signals import collected

_TICK_SECONDS = 0.1
_SAME_KEY_SECONDS = 0.5
_KILL_PATIENCE_SECONDS = 60.0
_ABORT_SECONDS = 5.0
"""Time from a rank's abort in which another one's end may turn out to be its cause: NCCL ends a process that
has lost its peer, and one that is killed ends only once its GPU's memory is given back.
"""
_PAUSED_LOOKS = 10
_INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True, kw_only=True)
class Limits(memory_floor.Floors):
    """Limits at which the supervisor acts; memory floors count on unified memory only. Tests shrink them."""

    interval_seconds: float = 1.0
    """Time between two looks at heartbeat and memory."""
    budget_scale: float = 1.0
    """Factor on all phase budgets."""


@dataclass(frozen=True, kw_only=True)
class Among:
    """The place of this host's ranks among those of a run of several hosts; by default they are all."""

    first_rank: int = 0
    elsewhere: bool = False
    """Whether other hosts have ranks of this run."""


def supervise(
    command: Sequence[str],
    *,
    environments: Sequence[Mapping[str, str]],
    ranks: int = 0,
    runtime_dir: Path,
    port: int | None,
    address: str = LOOPBACK,
    unified_memory: bool,
    on_ready: Callable[[], None] = lambda: None,
    on_end: Callable[[int, str], None] = lambda exit_code, cause: None,
    among: Among = Among(),
    meminfo_path: Path = cause_of_death.MEMINFO,
    memory_events_path: Path | None = None,
    limits: Limits = Limits(),
) -> int:
    """Run `command` to its end and return the exit code to pass on. Call it on the main thread.

    One process is started in each of `environments`, which are whole; the runtime folder is added. Rank 0 has
    the folder itself for its status and metrics, rank K `rank-K` in it. `port` None: no server. Of more
    `ranks`, the others' parents call `supervise_one` once `on_ready` was called here. `on_end` is called with
    the exit code, and the cause where the child has not told it, while the folder is held. SIGTERM, SIGINT
    and SIGHUP ask the child to save and end (75), a second SIGINT kills it (130). One that is silent for two
    phase budgets, or does not end within the save budget after it was asked or last got on with saving, is
    killed (74); one that a signal ended gives 71 for an OOM kill, else 128 + signal. Raises ConfigError when
    port or folder is taken, StoppedError when a run that was to end keeps the folder.
    """
    runtime_dir.mkdir(parents=True, exist_ok=True)
    with holding(runtime_dir) as lock, collected() as received, contextlib.ExitStack() as serving:
        forget(runtime_dir)
        watch = _Watch(
            directory=runtime_dir,
            ranks=ranks or len(environments),
            among=among,
            others=Others(own=0) if ranks > len(environments) else None,
            unified_memory=unified_memory,
            meminfo=meminfo_path,
            memory_events=memory_events_path or cause_of_death.memory_events_path(),
            limits=limits,
        )
        watch.beat_first()
        answers = server.serving(port, metrics=watch.metrics_text, health=watch.verdict, address=address)
        with _forgetting(runtime_dir):
            serving.enter_context(answers)
        on_ready()
        watch.start(command, environments, lock)
        code, cause = watch.run(received)
        on_end(code, cause)
        return code


@contextlib.contextmanager
def _forgetting(runtime_dir: Path) -> Iterator[None]:
    """Leave no status behind where the port cannot be had: nothing runs."""
    try:
        yield
    except ConfigError:
        forget(runtime_dir)
        raise


def supervise_one(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    rank: int,
    ranks: int,
    runtime_dir: Path,
    limits: Limits = Limits(),
) -> int:
    """Run `command` as a rank but the first, whose parent holds `runtime_dir`; return the exit code.

    Signals are as those of `supervise`. When another rank ends otherwise than well, this one is killed and
    its exit code is the other one's, which says why.
    """
    with collected() as received:
        watch = _Watch(
            directory=runtime_dir,
            first=rank,
            ranks=ranks,
            others=Others(own=rank),
            memory_events=cause_of_death.memory_events_path(),
            limits=limits,
        )
        watch.start(command, [environment], None)
        return watch.run(received)[0]


@dataclass(eq=False, kw_only=True)
class _Watch:
    """The children, by rank from `first` on, and what is known about them. Other threads may call `verdict`
    and `metrics_text`.
    """

    directory: Path
    first: int = 0
    ranks: int
    among: Among = Among()
    others: Others | None
    """The ranks of other parents; None where this one has all."""
    unified_memory: bool = False
    meminfo: Path = cause_of_death.MEMINFO
    memory_events: Path | None
    limits: Limits
    children: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)
    _asked: tuple[float, signal.Signals, ExitCode] | None = field(default=None, init=False)
    _killed: tuple[float, int, str] | None = field(default=None, init=False)
    _samples: tuple[memory_floor.Sample, ...] = field(default=(), init=False)
    _trained: bool = field(default=False, init=False)
    _was_healthy: bool = field(default=True, init=False)
    _was_hung: bool = field(default=False, init=False)
    _awake_since: float = field(default=-math.inf, init=False)
    _told_elsewhere: bool = field(default=False, init=False)

    def beat_first(self) -> None:
        """Beat for each rank before the first question: a child that cannot even import is found out too."""
        for rank in range(self.ranks):
            folder = status.rank_folder(self.directory, rank)
            StatusWriter(folder, ranks=self.ranks, first_rank=self.among.first_rank).beat(Phase.LOAD)

    def start(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]], lock: int | None
    ) -> None:
        """Start a rank in each environment; `lock` is the descriptor of the folder's lock, if held here.

        Raises OSError where one cannot be started, and ends those before it.
        """
        for environment in environments:
            env = {**environment, RUNTIME_DIR_VARIABLE: str(self.directory)}
            try:
                # In a group of its own a terminal's Ctrl-C reaches only us, and we can kill its workers with
                # it; with the lock's descriptor the folder stays taken while the child outlives us to save.
                kept = () if lock is None else (lock,)
                child = subprocess.Popen(
                    list(command), stdin=subprocess.DEVNULL, env=env, process_group=0, pass_fds=kept
                )
            except OSError:
                self.kill_groups()
                raise
            self.children.append(child)

    def verdict(self) -> Verdict:
        """Judge the run now."""
        return self._judge(status.read_ranks(self.directory))

    def _judge(self, ranks: Sequence[status.Status | None]) -> Verdict:
        return status.verdict_of_ranks(ranks, time.monotonic(), scale=self.limits.budget_scale)

    def metrics_text(self) -> str:
        """The text of /metrics."""
        ranks = status.read_ranks(self.directory)
        return server.metrics_text(
            self.directory,
            version=trainer.__version__,
            child_up=bool(self.children) and all(child.returncode is None for child in self.children),
            verdict=self._judge(ranks),
            ranks=ranks,
            first_rank=self.among.first_rank,
            unified_memory=self.unified_memory,
            available=cause_of_death.available_bytes(self.meminfo),
        )

    def run(self, received: list[tuple[float, int]]) -> tuple[int, str]:
        """Watch the children to their end; return the exit code and the cause. `received` fills with signals
        and their times.
        """
        oom_kills_before = cause_of_death.oom_kills(self.memory_events)
        rank, returncode = self._wait(received)
        self.kill_groups()  # the other ranks, and workers that outlived theirs
        oom_kills = cause_of_death.oom_kills_since(self.memory_events, oom_kills_before)
        self._hear_others(returncode)
        code, cause = self._outcome(returncode, oom_kills)
        if cause and (self.ranks > 1 or self.among.elsewhere) and self._killed is None:
            cause = f"rank {self.among.first_rank + self.first + rank}: {cause}"
        if cause and not self._told_elsewhere:
            self._say(cause)
        for number, child in enumerate(self.children):  # none is left when the exit code is told
            try:
                child.wait(timeout=_KILL_PATIENCE_SECONDS if returncode is not None else 0)
            except subprocess.TimeoutExpired:
                if len(self.children) > 1:
                    self._say(f"rank {number} does not die: it is stuck in the kernel, mostly in a driver")
        with contextlib.suppress(StorageError):  # the exit code is worth more than its note
            status.write_end(status.rank_folder(self.directory, self.first), exit_code=code, cause=cause)
        return code, cause

    def _wait(self, received: list[tuple[float, int]]) -> tuple[int, int | None]:
        """Watch until all children have ended well, or the first one otherwise: its rank and what it ended
        with, None where one does not even die.
        """
        next_look, first_end = time.monotonic(), None
        tick = min(_TICK_SECONDS, self.limits.interval_seconds)
        while True:
            running = [child for child in self.children if child.poll() is None]
            ended = {rank: child.returncode for rank, child in enumerate(self.children) if child.returncode}
            if ended or not running:
                rank = min(ended, key=lambda one: cause_of_death.order(ended[one]), default=0)
                first_end = time.monotonic() if first_end is None else first_end
                late = time.monotonic() - first_end > _ABORT_SECONDS
                if ended.get(rank) != -signal.SIGABRT or late or not running:
                    return rank, ended.get(rank, 0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(timeout=tick)
                continue
            now = time.monotonic()
            self._answer(received)
            if now >= next_look:
                if now - next_look > _PAUSED_LOOKS * self.limits.interval_seconds:
                    self._awake_since = now
                next_look = now + self.limits.interval_seconds
                self._look(now)
            if self._killed is not None and now - self._killed[0] > _KILL_PATIENCE_SECONDS:
                self._say("the training process does not die: it is stuck in the kernel, mostly in a driver")
                return 0, None

    def _answer(self, received: list[tuple[float, int]]) -> None:
        """React to the signals that arrived: the first asks, a second SIGINT kills."""
        while received:
            at, signum = received.pop(0)
            if self._asked is None:
                # a launcher asks its processes to end where one of them ended
                self._end_with_others(status.read_ranks(self.directory))
                why = f"{signal.Signals(signum).name}: the run saves and ends"
                self._ask(stop.ASK_SIGNAL, ExitCode.STOPPED, why)
            # A wrapper (make, a shell script) may pass on the key press that the terminal sent us as well.
            elif signum == signal.SIGINT and at - self._asked[0] > _SAME_KEY_SECONDS:
                self._kill(_INTERRUPTED, "killed on the second Ctrl-C; checkpoints that are there are kept")

    def _look(self, now: float) -> None:
        """Look at the heartbeat, at the time since the child was asked to end, and at the memory."""
        ranks = status.read_ranks(self.directory)
        self._end_with_others(ranks)
        if self.first == 0 and self._killed is None:
            self._look_at_heartbeats(ranks, now)
            self._look_at_requests(ranks[0])
        grace = status.BUDGET_SECONDS[Phase.SAVE] * self.limits.budget_scale
        saved = max((one.beat for one in ranks if one is not None and one.phase is Phase.SAVE), default=0.0)
        if self._asked is not None and now - max(self._asked[0], saved) > grace:
            since = "it was asked to" if saved < self._asked[0] else "it last got on with saving"
            self._kill(ExitCode.HUNG, f"killed: it did not end within {grace:.1f} s after {since}")
        self._trained = self._trained or any(one is not None and one.phase is Phase.TRAIN for one in ranks)
        if self.unified_memory:
            self._look_at_memory(now)

    def _look_at_requests(self, first: status.Status | None) -> None:
        if control.take(self.directory, (Order.STOP,)):
            self._ask(stop.ASK_SIGNAL, ExitCode.STOPPED, "asked to stop: the run saves and ends")
            step = 0 if first is None or first.optimizer_step is None else first.optimizer_step
            control.answer(self.directory, Order.STOP, step=step, done="the run saves and ends")

    def _end_with_others(self, ranks: Sequence[status.Status | None]) -> None:
        """Kill this parent's rank where one of another parent did not end well: it may wait for it."""
        end = self.others.end(ranks) if self.others is not None and self._killed is None else None
        if end is not None:
            self._told_elsewhere = end.told
            self._kill(end.exit_code, end.cause)

    def _hear_others(self, returncode: int | None) -> None:
        """Take over the end of another parent's rank, the first cause, which after an abort is waited for."""
        end = time.monotonic() + (_ABORT_SECONDS if returncode == -signal.SIGABRT and self.others else 0)
        while returncode and self._killed is None:
            self._end_with_others(status.read_ranks(self.directory))
            if time.monotonic() >= end:
                return
            time.sleep(_TICK_SECONDS)

    def _look_at_heartbeats(self, ranks: Sequence[status.Status | None], now: float) -> None:
        judged = self._judge(ranks)
        if judged.healthy != self._was_healthy:
            self._was_healthy = judged.healthy
            kill_at = (
                "" if judged.budget is None else f"; killed at {status.HUNG_FACTOR * judged.budget:.1f} s"
            )
            self._say("healthy again" if judged.healthy else f"unhealthy: {judged.reason}{kill_at}")
        # After a pause of the whole machine or container the child gets a budget's time to beat again.
        hung = judged.hung and judged.budget is not None and now - self._awake_since > judged.budget
        if hung and (self._was_hung or len(ranks) == 1):  # statuses of several are not of one moment
            self._kill(ExitCode.HUNG, f"killed as hung: {judged.reason}")
        self._was_hung = hung

    def _look_at_memory(self, now: float) -> None:
        available = cause_of_death.available_bytes(self.meminfo)
        if available is None:
            return
        newest = memory_floor.Sample(at=now, available=available, trained=self._trained)
        self._samples = memory_floor.remember(self._samples, newest, self.limits)
        decision = memory_floor.decide(self._samples, self.limits)
        if decision.action is memory_floor.Action.KILL:
            self._kill(ExitCode.OUT_OF_MEMORY, decision.reason)
        elif decision.action is memory_floor.Action.ASK:
            self._ask(stop.MEMORY_SIGNAL, ExitCode.OUT_OF_MEMORY, decision.reason)

    def _ask(self, signum: signal.Signals, exit_code: ExitCode, why: str) -> None:
        if self._asked is None and self._killed is None:
            self._asked = (time.monotonic(), signum, exit_code)
            for child in self.children:
                child.send_signal(signum)
            if self.first == 0:
                self._say(why)

    def _kill(self, exit_code: int, why: str) -> None:
        if self._killed is None:
            self._killed = (time.monotonic(), exit_code, why)
            self.kill_groups()

    def kill_groups(self) -> None:
        """Kill all children and the workers of their groups."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    def _outcome(self, returncode: int | None, oom_kills: int | None) -> tuple[int, str]:
        """Exit code to pass on, and the cause when the child has not told it itself.

        `oom_kills` are those of its group since it was started.
        """
        if self._killed is not None and (
            self._told_elsewhere or returncode in (None, -signal.SIGKILL, -signal.SIGABRT, ExitCode.PEER_LOST)
        ):
            return self._killed[1], self._killed[2]
        assert returncode is not None, "only a kill is not waited for to the end"
        if returncode == ExitCode.PEER_LOST and self.among.elsewhere:
            return returncode, ""
        if returncode == ExitCode.PEER_LOST:
            return ExitCode.STOPPED, "the connection between its processes broke; it can be resumed"
        if returncode in set(ExitCode):
            return returncode, ""
        if returncode > 0:
            hint = f"; processes of its group OOM-killed meanwhile: {oom_kills}" if oom_kills else ""
            return returncode, f"unexpected exit code {returncode}{hint}"
        if self._asked is not None and -returncode == self._asked[1]:
            why = "it ended before it could handle the request, so before there was anything to save"
            return self._asked[2], why
        return cause_of_death.explain_death(
            -returncode, oom_kills_since_start=oom_kills, several_hosts=self.among.elsewhere
        )

    def _say(self, text: str) -> None:
        say(text)
