"""Word to other hosts: who is told what, and how long it is tried."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import CPU_FACTS, ROOT
from trainer.cli import jobs, main, other_hosts
from trainer.cli.options import Layers
from trainer.config.hosts import ONE, Hosts
from trainer.engine.meeting import meeting
from trainer.engine.meeting.meeting import Meeting
from trainer.engine.spec import Job, read_spec
from trainer.errors import ConfigError, meaning
from trainer.machine.reading import read_recorded
from trainer.planning.planning import plan_run
from trainer.telemetry.supervising import runtime_folder, supervisor

TWO = Hosts(count=2, number=1, address="127.0.0.1", port=7, source="TRAINER_NODES")


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str, float]]:
    """Host, exit code, text and seconds of each word."""
    made: list[tuple[int, int, str, float]] = []

    def announce(one: Meeting, exit_code: int, what: str, seconds: float) -> bool:
        made.append((one.host, exit_code, what, seconds))
        return True

    monkeypatch.setattr(meeting, "announce", announce)
    return made


def test_an_error_is_told_with_its_first_problem_and_stays_the_end(
    announced: list[tuple[int, int, str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="one"), other_hosts.telling(TWO):
        raise ConfigError("one")
    assert announced == [(1, 78, "one", other_hosts.TELL_SECONDS)]
    assert capsys.readouterr().err.splitlines()[-1] == "host 0: told"
    for code in (75, 130):  # a second Ctrl-C is a stop for others
        other_hosts.tell_end(TWO, code, "stopped")
        assert announced[-1][1] == 75 and announced[-1][-1] < other_hosts.TELL_SECONDS  # whoever asked waits
    other_hosts.tell_end(ONE, 78, "one host")
    assert len(announced) == 3


def test_a_second_start_beside_a_run_tells_nobody(
    announced: list[tuple[int, int, str, float]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run may read its data for minutes before it comes to where the others wait for it."""
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", str(tmp_path))
    with runtime_folder.holding(tmp_path):
        other_hosts.tell_end(TWO, 78, "the runtime folder is used by another run")
    assert not announced and "not told, since a run here goes on" in capsys.readouterr().err
    other_hosts.tell_end(TWO, 78, "one")
    assert len(announced) == 1


def test_a_key_that_is_not_there_is_told_before_anything_is_planned(
    announced: list[tuple[int, int, str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for name, value in (("NODES", "2"), ("NODE_RANK", "1"), ("MASTER", "127.0.0.1:7")):
        monkeypatch.setenv(f"TRAINER_{name}", value)
    for command in ("train", "cache"):
        assert main([command, "train_configs/quickstart.yaml", "--set", "lora.rnk=3"]) == 78
    assert [one[:3] for one in announced] == [(1, 78, "unknown key `lora.rnk`")] * 2


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_telling_and_not_the_exit_code(
    signum: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def announce(*_: object) -> bool:
        os.kill(os.getpid(), signum)
        raise AssertionError("the signal was not heeded")

    monkeypatch.setattr(meeting, "announce", announce)
    with pytest.raises(ConfigError), other_hosts.telling(TWO):
        raise ConfigError("one")
    os.kill(os.getpid(), signum)  # only the exit code is left
    assert "not all were told: asked to end" in capsys.readouterr().err


def test_what_hinders_the_telling_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> bool:
        raise RuntimeError("address in use\nmore")

    monkeypatch.setattr(meeting, "announce", refused)
    other_hosts.tell_end(TWO, 78, "one")
    assert "not told at 127.0.0.1:7: address in use\n" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "trainer.engine.meeting.meeting", None)
    other_hosts.tell_end(TWO, 78, "one")
    assert "torch cannot be imported here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "code", "told"),
    [
        ((), 137, True),
        ((), 78, True),
        (("came_file",), 137, True),
        (("came_file",), 71, False),
        (("came_file", "met_file"), 137, False),
        (("came_file", "met_file"), 71, False),
    ],
)
def test_an_end_is_told_that_those_who_wait_cannot_see(
    made: tuple[str, ...],
    code: int,
    told: bool,
    announced: list[tuple[int, int, str, float]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One before the meeting, and a kill before all have met."""

    def supervise(command: Sequence[str], **_: Any) -> int:
        spec = read_spec(Path(command[-1]))
        for name in made:
            getattr(spec, name).touch()
        return code

    monkeypatch.setattr(supervisor, "supervise", supervise)
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.chdir(ROOT)
    loaded = Layers([Path("train_configs/quickstart.yaml")], output=tmp_path / "run").load()
    loaded, facts = dataclasses.replace(loaded, hosts=TWO), read_recorded(CPU_FACTS)
    assert jobs.run_job(loaded, facts, plan_run(loaded, facts), Job(mode="train")) == code
    assert announced == ([(1, code, meaning(code), other_hosts.TELL_SECONDS)] if told else [])
