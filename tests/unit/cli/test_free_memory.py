"""A start while other programs have the host's memory: waited for where the run fits without them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.golden.plans import ROOT, load_shipped
from tests.unit.planning.conftest import GIB, machine
from trainer.cli import measure
from trainer.config.reading.load import Loaded, with_settings
from trainer.errors import ExitCode, HardwareError
from trainer.machine.facts import Facts, HostMemory
from trainer.planning import planning

TAKEN = HostMemory(total_bytes=24 * GIB, available_bytes=4 * GIB)
NEVER = {
    "a small machine": HostMemory(total_bytes=4 * GIB, available_bytes=3 * GIB),
    "a small container": HostMemory(
        total_bytes=24 * GIB, available_bytes=3 * GIB, cgroup_limit_bytes=4 * GIB
    ),
}


class Clock:
    """Time that passes in sleeps alone, and a machine whose memory others give back at some time."""

    def __init__(self, memory: HostMemory, free_at: float) -> None:
        self.now, self.free_at = 0.0, free_at
        self.free = machine("cpu")
        self.full = dataclasses.replace(self.free, memory=memory)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def facts(self) -> Facts:
        return self.free if self.now > self.free_at else self.full


def of_two() -> Loaded:
    """The quickstart in two processes, which need 4.1 GiB with what is left to others."""
    loaded = load_shipped(Path("train_configs/quickstart.yaml"))
    return with_settings(
        loaded, {"parallel.gpus": 2, "train.train_batch_size": 4, "train.gradient_accumulation_steps": 2}
    )


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    monkeypatch.setattr(planning, "prepare_base", lambda _: None)
    return monkeypatch


def on(at: pytest.MonkeyPatch, memory: HostMemory, free_at: float = 1e9) -> Clock:
    clock = Clock(memory, free_at)
    at.setattr(measure, "time", clock)
    at.setattr(planning, "machine_facts", clock.facts)
    return clock


def test_memory_that_is_given_back_is_waited_for(
    at: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = on(at, TAKEN, free_at=3.0)
    facts, plan = measure.planned_in_free_memory(of_two(), probe=False)
    assert (facts, plan.ranks) == (clock.free, 2)
    assert 3 < clock.now < 5
    said = capsys.readouterr().err
    assert said.count("the run does not fit") == 1
    assert "other programs have 17.6 GiB of the host's: waiting 20 s for it" in said


def test_memory_that_others_keep_is_an_error_that_names_them(at: pytest.MonkeyPatch) -> None:
    clock = on(at, TAKEN)
    at.setattr(measure, "LOOK_SECONDS", 4.2)
    with pytest.raises(HardwareError, match=r"other programs have 17\.6 GiB of the host's 24\.0 GiB") as told:
        measure.planned_in_free_memory(of_two(), probe=False)
    assert told.value.exit_code == ExitCode.HARDWARE
    assert 20 < clock.now < 22


@pytest.mark.parametrize("memory", NEVER.values(), ids=NEVER)
def test_what_fits_at_no_time_is_refused_at_once(memory: HostMemory, at: pytest.MonkeyPatch) -> None:
    clock = on(at, memory)
    with pytest.raises(HardwareError, match="use a machine with more memory") as told:
        measure.planned_in_free_memory(of_two(), probe=False)
    assert "other programs" not in str(told.value)
    assert clock.now == 0
