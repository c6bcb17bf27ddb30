"""Requests to a run: none lost, none done twice, and each with its answer."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.errors import ConfigError, Problem
from trainer.telemetry import control, locks
from trainer.telemetry.control import BETWEEN_STEPS, Order
from trainer.telemetry.run_folder import process
from trainer.telemetry.runs import read_run
from trainer.telemetry.status import LOCK_FILE, Phase, StatusWriter


def states(runtime: Path) -> list[tuple[Order, int | None, str]]:
    return [(one.order, one.step, one.done) for one in control.requests(runtime)]


def test_a_request_is_open_until_it_is_answered(tmp_path: Path) -> None:
    assert control.take(tmp_path, BETWEEN_STEPS) == () and states(tmp_path) == []
    control.put(tmp_path, Order.SAMPLE)
    control.put(tmp_path, Order.SAVE)
    control.put(tmp_path, Order.STOP)
    assert states(tmp_path) == [(order, None, "") for order in (Order.SAMPLE, Order.SAVE, Order.STOP)]
    assert control.take(tmp_path, BETWEEN_STEPS) == (Order.SAVE, Order.SAMPLE)
    assert len(states(tmp_path)) == 3, "taken ones are still open"
    assert control.take(tmp_path, BETWEEN_STEPS) == (), "and are not taken again"
    control.answer(tmp_path, Order.SAVE, step=7, done="checkpoints/step-000007")
    control.put(tmp_path, Order.SAVE)
    assert states(tmp_path)[1:] == [
        (Order.SAVE, 7, "checkpoints/step-000007"),
        (Order.STOP, None, ""),
        (Order.SAVE, None, ""),
    ]
    control.forget(tmp_path)
    assert states(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_an_answer_of_before_the_clock_was_set_back_is_none_to_a_later_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = control.put(tmp_path, Order.SAVE)
    control.take(tmp_path, BETWEEN_STEPS)
    control.answer(tmp_path, Order.SAVE, step=7, done="checkpoints/step-000007")
    monkeypatch.setattr(control.time, "time", lambda: first.asked_unix_seconds - 6 * 3600)
    second = control.put(tmp_path, Order.SAVE)
    assert [one.step for one in control.requests(tmp_path)] == [7, None], "the open one is the later one"
    assert second.asked_unix_seconds > first.asked_unix_seconds


def test_previews_that_were_not_drawn_are_a_problem_of_the_end(tmp_path: Path) -> None:
    assert control.not_drawn(tmp_path) == ()
    control.put(tmp_path, Order.SAVE)
    assert control.not_drawn(tmp_path) == (), "a run that ends saves"
    control.put(tmp_path, Order.SAMPLE)
    (asked,) = control.not_drawn(tmp_path)
    assert "were not drawn" in asked.what and "ask again" in asked.remedy
    control.take(tmp_path, BETWEEN_STEPS)
    assert control.not_drawn(tmp_path) == (asked,), "it was about to draw them"
    control.answer(tmp_path, Order.SAMPLE, step=7, done="samples/step-000007.png")
    assert control.not_drawn(tmp_path) == ()


def _ask_often(runtime: Path, times: int, go: Event) -> None:
    go.wait()
    for _ in range(times):
        control.put(runtime, Order.SAVE)


def test_a_request_that_comes_while_one_is_carried_out_is_not_lost(tmp_path: Path) -> None:
    """Writers in other processes; after the last of them the next look finds one, of its time."""
    context = multiprocessing.get_context("fork")
    go = context.Event()
    writers = [context.Process(target=_ask_often, args=(tmp_path, 200, go)) for _ in range(2)]
    for writer in writers:
        writer.start()
    go.set()
    taken = 0
    while any(writer.is_alive() for writer in writers):
        if control.take(tmp_path, BETWEEN_STEPS):
            taken += 1
            control.answer(tmp_path, Order.SAVE, step=taken, done="saved")
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    last = control.put(tmp_path, Order.SAVE)
    assert control.take(tmp_path, BETWEEN_STEPS) == (Order.SAVE,)
    control.answer(tmp_path, Order.SAVE, step=taken + 1, done="saved")
    (only,) = control.requests(tmp_path)
    assert (only.step, only.asked_unix_seconds) == (taken + 1, last.asked_unix_seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        *(f'{{"asked_unix_seconds": {one}}}' for one in ('"x"', "NaN", 10**400)),
        *(f'{{"asked_unix_seconds": 1, {one}}}' for one in ('"step": "1"', '"step": 1.5', '"done": 1')),
    ],
)
def test_a_file_of_somebody_else_is_an_order_and_no_more(tmp_path: Path, text: str) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control/save.json").write_text(text)
    (tmp_path / "control/save.done.json").write_text(text)
    assert control.requests(tmp_path) == ()
    assert control.take(tmp_path, BETWEEN_STEPS) == (Order.SAVE,)
    control.answer(tmp_path, Order.SAVE, step=1, done="saved")
    assert json.loads((tmp_path / "control/save.done.json").read_text())["step"] == 1


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run that trains in this process, as far as locks and records say; runtime beside it."""
    run_dir, runtime = tmp_path / "run", tmp_path / "runtime"
    run_dir.mkdir()
    runtime.mkdir()
    held = {"supervisor": os.getpid(), "taken": Problem(what="taken"), "on_wait": print}
    with locks.holding(run_dir / ".lock", **held), locks.holding(runtime / LOCK_FILE, **held):
        process.begin(run_dir, supervisor=os.getpid(), runtime_dir=runtime)
        StatusWriter(runtime).beat(Phase.TRAIN, step=3, total=9)
        yield run_dir


def test_a_run_is_asked_by_its_folder(training: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime = training.parent / "runtime"
    assert main(["runs", "control", str(training), "sample"]) == 0
    assert "to sample" in capsys.readouterr().err
    assert control.take(runtime, BETWEEN_STEPS) == (Order.SAMPLE,)
    (asked,) = read_run(training).requests
    assert (asked.order, asked.step) == (Order.SAMPLE, None)
    control.answer(runtime, Order.SAMPLE, step=4, done="samples/step-000004.png")
    assert control.answered(training, asked) == read_run(training).requests[0]
    assert read_run(training).requests[0].step == 4


def test_a_stop_is_done_when_the_run_has_ended(training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when its supervisor has taken it: the run may save for minutes."""
    asked, looked = control.ask(training, Order.STOP), list[float]()
    control.take(training.parent / "runtime", (Order.STOP,))
    control.answer(training.parent / "runtime", Order.STOP, step=3, done="the run saves and ends")
    record = (training / "process.json").read_text()

    def ends(seconds: float) -> None:
        looked.append(seconds)
        if len(looked) == 3:
            ended = {**json.loads(record), "supervisor": os.getpid() + 1}
            (training / "process.json").write_text(json.dumps(ended))

    monkeypatch.setattr(control.time, "sleep", ends)
    assert control.answered(training, asked) is None and len(looked) == 3


def test_waiting_ends_with_the_run(training: Path) -> None:
    first, asked = control.ask(training, Order.SAVE), control.ask(training, Order.STOP)
    control.answer(training.parent / "runtime", Order.SAVE, step=3, done="saved")
    record = json.loads((training / "process.json").read_text())
    (training / "process.json").write_text(json.dumps({**record, "supervisor": os.getpid() + 1}))
    assert control.answered(training, asked) is None
    control.put(training.parent / "runtime", Order.SAVE)
    control.take(training.parent / "runtime", BETWEEN_STEPS)
    control.answer(training.parent / "runtime", Order.SAVE, step=4, done="saved")
    last = control.answered(training, first)
    assert last is not None and last.step == 4, "an answer that came before the end counts"


def test_without_a_run_there_is_nobody_to_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "control", str(tmp_path), "stop"]) == 78
    assert f"{tmp_path}: no run trains in this folder now" in capsys.readouterr().err
    process.begin(tmp_path, supervisor=os.getpid(), runtime_dir=tmp_path)
    process.end(tmp_path, supervisor=os.getpid(), exit_code=75, cause="", problems=())
    with pytest.raises(ConfigError, match="no run trains"):
        control.ask(tmp_path, Order.STOP)
    assert not (tmp_path / "control").exists()


def test_a_run_without_its_record_has_not_begun(tmp_path: Path) -> None:
    """The folder's lock is taken before the record is written; one of the attempt before may be there."""
    process.begin(tmp_path, supervisor=os.getpid(), runtime_dir=tmp_path)
    process.end(tmp_path, supervisor=os.getpid(), exit_code=75, cause="", problems=())
    held = {"supervisor": os.getpid(), "taken": Problem(what="taken"), "on_wait": print}
    with locks.holding(tmp_path / ".lock", **held):
        for _ in range(2):
            with pytest.raises(ConfigError, match="has not begun"):
                control.ask(tmp_path, Order.STOP)
            (tmp_path / "process.json").unlink(missing_ok=True)
    assert not (tmp_path / "control").exists()


def test_a_runtime_folder_of_somebody_else_is_not_written_to(training: Path, tmp_path: Path) -> None:
    record = json.loads((training / "process.json").read_text())
    (training / "process.json").write_text(json.dumps({**record, "runtime_dir": str(tmp_path)}))
    with pytest.raises(ConfigError, match="not seen from here"):
        control.ask(training, Order.STOP)
    assert not (tmp_path / "control").exists()
