"""The other ranks of a run whose ranks have a parent each, as launchers start them: the first one's end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.errors import ExitCode
from trainer.telemetry import locks
from trainer.telemetry.status import Phase, Status

_LOST_SECONDS = 3.0
_START_SECONDS = 300.0
"""Longest time from the first beat, which rank 0's parent wrote for all, to a rank's own."""


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of another rank that ends this one: the exit code for all, and why."""

    exit_code: int
    cause: str
    told: bool
    """True if its parent has said why."""


@dataclass(eq=False, kw_only=True)
class Others:
    """All ranks but `own`, by their statuses."""

    own: int
    _gone: dict[int, float] = field(default_factory=dict, init=False)
    """Ranks that are gone without a word, and since when."""

    def end(self, ranks: Sequence[Status | None]) -> End | None:
        """The end of a rank that did not end well; None where all go on.

        Its status says so, written by its parent. One that stays gone without that has lost its parent too.
        Of ranks that nobody starts rank 0 alone knows: variables of a launcher may be left behind in a shell.
        """
        others = {rank: one for rank, one in enumerate(ranks) if one is not None and rank != self.own}
        for one in others.values():
            if one.exit_code:
                return End(exit_code=one.exit_code, cause=one.cause, told=True)
        now = time.monotonic()
        self._gone = {
            rank: self._gone.get(rank, now)
            for rank, one in others.items()
            if one.exit_code is None and one.phase is not Phase.DONE and not locks.is_alive(one.pid)
        }
        for rank, since in self._gone.items():
            if now - since > _LOST_SECONDS:
                cause = f"rank {rank} is gone, and so is its supervisor; the run can be resumed"
                return End(exit_code=ExitCode.STOPPED, cause=cause, told=False)
        for rank, one in others.items():
            if self.own == 0 and one.pid == os.getpid() and now - one.beat > _START_SECONDS:
                cause = f"rank {rank} was never started: unset RANK and LOCAL_RANK if no launcher is there"
                return End(exit_code=ExitCode.BAD_CONFIG, cause=cause, told=False)
        return None
