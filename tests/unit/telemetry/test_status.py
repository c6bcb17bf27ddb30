"""The heartbeat and the one function that judges it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from trainer.errors import ExitCode, NoSpaceError
from trainer.files import atomic
from trainer.telemetry.sinks.metrics import METRICS_FILE, RunMetrics
from trainer.telemetry.status import (
    BUDGET_SECONDS,
    Phase,
    Status,
    StatusWriter,
    budget_seconds,
    read_status,
    verdict,
    write_end,
)

MINUTE = 60.0


def beaten(phase: Phase, *, beat: float = 1000.0, **changes: object) -> Status:
    plain = Status(
        phase=phase, beat=beat, beat_unix_seconds=1.7e9, boot_id="b", pid=1, started_unix_seconds=1.7e9
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("phase", "median", "minutes"),
    [
        (Phase.LOAD, None, 30),
        (Phase.CACHE, None, 10),
        (Phase.FIRST_STEP, None, 30),
        (Phase.TRAIN, None, 5),
        (Phase.TRAIN, 1.0, 5),
        (Phase.TRAIN, 60.0, 10),
        (Phase.PREVIEW, 60.0, 10),
        (Phase.SAVE, 600.0, 30),
    ],
)
def test_the_budget_of_a_phase_separates_healthy_from_unhealthy_from_hung(
    phase: Phase, median: float | None, minutes: float
) -> None:
    status = beaten(phase, median_step_seconds=median)
    budget = minutes * MINUTE
    assert budget_seconds(status) == budget
    inside = verdict(status, 1000 + budget - 1)
    assert (inside.healthy, inside.hung) == (True, False)
    outside = verdict(status, 1000 + budget + 1)
    assert (outside.healthy, outside.ready, outside.hung) == (False, False, False)
    assert f"in phase {phase}" in outside.reason
    assert verdict(status, 1000 + 2 * budget + 1).hung


def test_only_a_run_past_caching_is_ready() -> None:
    ready = {phase for phase in Phase if verdict(beaten(phase), 1001.0).ready}
    assert ready == {Phase.FIRST_STEP, Phase.TRAIN, Phase.SAVE, Phase.PREVIEW, Phase.DONE}
    assert set(BUDGET_SECONDS) == set(Phase) - {Phase.DONE}


def test_no_status_is_unhealthy() -> None:
    judged = verdict(None, 5.0)
    assert (judged.healthy, judged.ready, judged.hung) == (False, False, False)
    assert "no run" in judged.reason


def test_a_finished_run_stays_healthy() -> None:
    for status in (beaten(Phase.DONE), beaten(Phase.DONE, exit_code=0)):
        judged = verdict(status, 1e9)
        assert (judged.healthy, judged.hung, judged.reason) == (True, False, "finished")


def test_a_run_that_ended_badly_is_unhealthy_at_once() -> None:
    judged = verdict(beaten(Phase.TRAIN, step=3, total=9, exit_code=70), 1000.0)
    assert not judged.healthy
    assert "exit code 70 in phase train 3/9: the loss or a gradient became NaN" in judged.reason
    judged = verdict(beaten(Phase.TRAIN, exit_code=137, cause="SIGKILL: who knows"), 1000.0)
    assert "137 in phase train: SIGKILL: who knows" in judged.reason


def test_a_beat_in_the_future_is_from_another_boot() -> None:
    judged = verdict(beaten(Phase.TRAIN), 999.0)
    assert not judged.healthy
    assert "before this machine's last start" in judged.reason


def test_what_was_written_is_read(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path / "new")
    assert writer.phase is None
    writer.beat(Phase.TRAIN, step=4, total=10, median_step_seconds=2.5)
    assert writer.phase is Phase.TRAIN
    status = read_status(tmp_path / "new")
    assert status is not None
    assert (status.phase, status.step, status.total, status.median_step_seconds) == (Phase.TRAIN, 4, 10, 2.5)
    assert verdict(status, status.beat).reason == "phase train 4/10, last heartbeat 0.0 s ago"


@pytest.mark.parametrize(
    "text", ["", '{"phase": "tr', "[]", "{}", '{"phase": "dance"}', '{"phase": "load", "x": 1}']
)
def test_a_damaged_status_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("beat", "soon"), ("beat", None), ("beat", float("nan")), ("beat", [1]), ("beat", 10**400),
     ("step", "4"), ("pid", {}), ("exit_code", "0"), ("median_step_seconds", float("inf")), ("cause", 3),
     ("phase", ["train"]), ("device_memory_reserved_peak_bytes", "1"), ("ranks", "2"), ("ranks", 0),
     ("ranks", 1025), ("first_rank", "1"), ("first_rank", -1), ("first_rank", 1025)],
)  # fmt: skip
def test_a_status_with_a_value_that_cannot_be_judged_counts_as_none(
    tmp_path: Path, key: str, value: object
) -> None:
    StatusWriter(tmp_path).beat(Phase.TRAIN, step=4)
    path = tmp_path / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert read_status(tmp_path) is None


@pytest.mark.parametrize("text", ["[" * 100_000, '{"phase":' * 100_000, " " * 1_000_000 + "{}", "1" * 10_000])
def test_an_absurd_status_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None


def test_half_a_status_and_one_of_another_boot_count_as_none(tmp_path: Path) -> None:
    StatusWriter(tmp_path).beat(Phase.LOAD)
    path = tmp_path / "status.json"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert read_status(tmp_path) is None
    path.write_text(json.dumps({**json.loads(text), "boot_id": "another"}))
    assert read_status(tmp_path) is None
    path.write_text(text)
    assert read_status(tmp_path) is not None


def test_beats_are_written_once_a_second_and_at_every_phase_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[Phase, int | None]] = []

    def write(path: Path, text: str, *, sync: bool) -> None:
        row = json.loads(text)
        written.append((Phase(row["phase"]), row["step"]))

    monkeypatch.setattr(atomic, "write_text", write)
    clock = Clock()
    writer = StatusWriter(tmp_path, clock=clock)
    for step in range(20):
        clock.now += 0.125
        writer.beat(Phase.TRAIN, step=step)
    writer.beat(Phase.SAVE, step=20)
    assert written == [(Phase.TRAIN, 0), (Phase.TRAIN, 8), (Phase.TRAIN, 16), (Phase.SAVE, 20)]


def test_the_median_is_that_of_whole_steps(tmp_path: Path) -> None:
    clock = Clock()
    writer = StatusWriter(tmp_path, interval_seconds=0.0, clock=clock)
    writer.beat(Phase.FIRST_STEP)
    clock.now += 500  # the first step compiles
    writer.beat(Phase.TRAIN, item_done=True)
    for _ in range(5):
        for micro_batch in range(4):
            clock.now += 10
            writer.beat(Phase.TRAIN, item_done=micro_batch == 3)
    clock.now += 300
    writer.beat(Phase.PREVIEW, item_done=True)
    clock.now += 3000
    writer.beat(Phase.TRAIN, item_done=True)
    status = read_status(tmp_path)
    assert status is not None
    assert status.median_step_seconds == 40
    assert budget_seconds(status) == 400


def test_the_time_of_saves_is_no_part_of_a_step(tmp_path: Path) -> None:
    """Else a run that saves after each step would be taken for hung ten saves later."""
    clock = Clock()
    writer = StatusWriter(tmp_path, interval_seconds=0.0, clock=clock)
    for _ in range(5):
        writer.beat(Phase.SAVE)
        clock.now += 1000
        writer.beat(Phase.TRAIN)
        clock.now += 40
        writer.beat(Phase.TRAIN, item_done=True)
    status = read_status(tmp_path)
    assert status is not None and status.median_step_seconds == 40


def test_beats_of_one_second_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a beat would cost a file: the loop beats after each micro-batch."""
    written: list[str] = []
    monkeypatch.setattr(atomic, "write_text", lambda path, text, **_: written.append(text))
    clock = Clock()
    writer = StatusWriter(tmp_path, clock=clock)
    for step in range(2000):
        writer.beat(Phase.TRAIN, step=step, total=2000, item_done=True)
        clock.now += 0.001
    assert len(written) == 2


def test_the_end_is_recorded_beside_the_last_beat(tmp_path: Path) -> None:
    write_end(tmp_path, exit_code=74, cause="no status: nothing to record")
    assert read_status(tmp_path) is None
    StatusWriter(tmp_path).beat(Phase.SAVE, step=7)
    write_end(tmp_path, exit_code=74, cause="hung")
    status = read_status(tmp_path)
    assert status is not None
    assert (status.phase, status.step, status.exit_code, status.cause) == (Phase.SAVE, 7, 74, "hung")
    write_end(tmp_path, exit_code=ExitCode.OK, cause="")
    status = read_status(tmp_path)
    assert status is not None
    assert status.phase is Phase.DONE


def test_a_folder_that_is_tidied_away_is_made_again(tmp_path: Path) -> None:
    """Temporary folders are: the run goes on, and is seen."""
    writer, metrics = StatusWriter(tmp_path / "run", interval_seconds=0.0), RunMetrics(tmp_path / "run")
    writer.beat(Phase.TRAIN, step=1)
    shutil.rmtree(tmp_path / "run")
    metrics.write()
    writer.beat(Phase.TRAIN, step=2)
    metrics.write()
    status = read_status(tmp_path / "run")
    assert status is not None and status.step == 2
    assert (tmp_path / "run" / METRICS_FILE).is_file()


def test_a_full_folder_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StatusWriter(tmp_path, interval_seconds=0.0)

    def full(path: Path, text: str, *, sync: bool = True) -> None:
        raise NoSpaceError("full", where=str(path))

    monkeypatch.setattr(atomic, "write_text", full)
    writer.beat(Phase.TRAIN, step=1)  # nothing is there yet to write over
    assert read_status(tmp_path) is None
    monkeypatch.undo()
    writer.beat(Phase.TRAIN, step=2)
    monkeypatch.setattr(atomic, "write_text", full)
    writer.beat(Phase.TRAIN, step=3)
    status = read_status(tmp_path)
    assert status is not None
    assert status.step == 3
