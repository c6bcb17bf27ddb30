"""States of a job by its locks and exit code, and exit codes in words."""

from __future__ import annotations

import signal

import pytest

from trainer.errors import MEANING, ExitCode
from trainer.queue.launcher import State, judged, meaning


@pytest.mark.parametrize("code", ExitCode)
def test_our_exit_codes_have_their_own_words(code: ExitCode) -> None:
    assert meaning(int(code)) == f"exit code {int(code)}: {MEANING[code]}"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGRTMAX])
def test_a_death_by_a_signal_is_named_as_shells_count_it(signum: signal.Signals) -> None:
    assert meaning(128 + signum) == f"exit code {128 + signum}: ended by {signum.name}"


@pytest.mark.parametrize("code", [1, 2, 9, 127, 128, 128 + signal.SIGRTMAX + 1, 255])
def test_other_codes_are_unexpected(code: int) -> None:
    assert meaning(code) == f"exit code {code}: unexpected"


@pytest.mark.parametrize(
    ("exit_code", "known", "state", "words"),
    [
        (None, {"began": False}, State.WAITING, ""),
        (None, {"began": False, "held": True}, State.HELD, ""),
        (None, {"alive": True}, State.RUNNING, ""),
        (None, {"alive": True, "asked": True}, State.STOPPING, "saves, and ends"),
        # its supervisor was killed, and the run saves
        (137, {"alive": True}, State.RUNNING, "ends, with exit code 137"),
        (None, {}, State.LOST, "it was killed, or the machine was"),
        (0, {"held": True}, State.FINISHED, ""),
        (75, {}, State.WAITING, "stopped, goes on by itself"),
        (76, {}, State.WAITING, "another machine was lost, goes on by itself"),
        (75, {"held": True}, State.HELD, "stopped, resumable"),
        (75, {"asked": True}, State.HELD, "stopped, resumable"),
        *(
            (code, {}, State.FAILED, f"exit code {code}: ")
            for code in (1, 65, 69, 70, 71, 73, 74, 77, 78, 137)
        ),
    ],
)
def test_a_job_is_judged_by_its_locks_and_its_exit_code(
    exit_code: int | None, known: dict[str, bool], state: State, words: str
) -> None:
    """Nothing but a stop and a lost machine goes on without a person."""
    usual = {"alive": False, "began": True, "held": False, "asked": False}
    seen = judged(exit_code=exit_code, **usual | known)
    assert seen.state is state and words in seen.words
    assert bool(seen.words) == bool(words)
    assert seen.exit_code == (None if known.get("alive") else exit_code)
