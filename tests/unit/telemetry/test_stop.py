"""The stop flag of the training process."""

from __future__ import annotations

import os
import signal

import pytest

from trainer.errors import ExitCode, OutOfMemoryError, StoppedError
from trainer.telemetry.stop import ASK_SIGNAL, MEMORY_SIGNAL, StopFlag


@pytest.fixture
def flag() -> StopFlag:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    flag = StopFlag()
    flag.install()
    return flag


def test_nothing_is_requested_without_a_signal(flag: StopFlag) -> None:
    assert flag.requested is None
    flag.raise_if_requested()


@pytest.mark.parametrize("signum", [ASK_SIGNAL, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_asks_for_75(flag: StopFlag, signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)
    assert flag.requested is ExitCode.STOPPED
    with pytest.raises(StoppedError, match="stopped on request"):
        flag.raise_if_requested()


def test_a_terminal_that_closes_asks_nothing_under_nohup(flag: StopFlag) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    flag.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert flag.requested is None


def test_the_memory_signal_asks_for_71(flag: StopFlag) -> None:
    os.kill(os.getpid(), MEMORY_SIGNAL)
    assert flag.requested is ExitCode.OUT_OF_MEMORY
    with pytest.raises(OutOfMemoryError, match="below a floor, or soon there"):
        flag.raise_if_requested()


def test_only_the_first_signal_counts(flag: StopFlag) -> None:
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGINT):
        os.kill(os.getpid(), signum)
    assert flag.requested is ExitCode.STOPPED
