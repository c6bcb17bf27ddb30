"""Requests to stop, as signals to the training process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from types import FrameType

from trainer.errors import ExitCode, OutOfMemoryError, StoppedError

ASK_SIGNAL = signal.SIGTERM
"""Sent by the supervisor: save and end with 75."""
MEMORY_SIGNAL = signal.SIGUSR1
"""Sent by the supervisor when host memory runs low: save and end with 71."""
ON_REQUEST = "stopped on request"
"""Problem of a run that was itself asked to stop."""

_PR_SET_PDEATHSIG = 1
_MEANS: dict[int, ExitCode] = {
    signal.SIGTERM: ExitCode.STOPPED,
    signal.SIGINT: ExitCode.STOPPED,
    signal.SIGHUP: ExitCode.STOPPED,
    signal.SIGUSR1: ExitCode.OUT_OF_MEMORY,
}


class StopFlag:
    """Set by a signal, read by the work between two units (shard, sample, micro-batch, denoising step).

    Only the first signal counts: a second one must not cut short the save that the first one started. The
    supervisor decides when waiting has been long enough.
    """

    requested: ExitCode | None = None
    """The exit code that the run was asked to end with; None to go on."""
    remedy = "start the same command again to resume"
    """Remedy for work that was stopped."""

    def install(self) -> None:
        """Handle SIGTERM, SIGINT, SIGHUP and SIGUSR1 from now on; call it on the main thread."""
        for signum in heeded(_MEANS):
            signal.signal(signum, self._on_signal)

    def uninstall(self) -> None:
        """Ignore these signals from now on: the work is done, and Python would let them end it with another
        code than it has while it tidies up.
        """
        for signum in _MEANS:
            signal.signal(signum, signal.SIG_IGN)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = _MEANS[signum]

    def raise_if_requested(self) -> None:
        """Raise StoppedError (75) or OutOfMemoryError (71) when the run was asked to stop."""
        if self.requested is None:
            return
        if self.requested is ExitCode.OUT_OF_MEMORY:
            raise OutOfMemoryError(
                "stopped because the host runs out of available memory: below a floor, or soon there",
                remedy="end other processes, then start again to resume; data.cache_in_memory: false needs"
                " less of it",
            )
        raise StoppedError(ON_REQUEST, remedy=self.remedy)


def heeded(signums: Iterable[int]) -> list[int]:
    """Signals of `signums` that a process is to handle: SIGHUP, sent where a terminal closes or a session
    ends, not where it is ignored already: `nohup` has work go on without them.
    """
    return [one for one in signums if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel send this process SIGTERM when its parent ends; no effect outside Linux.

    Call it first thing in the training process, after `StopFlag.install`: then a supervisor that was killed
    leaves no run behind, and the run still saves. The parent is the thread that started this process;
    with its pid in `parent` one that was gone before this call is noticed too.
    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
