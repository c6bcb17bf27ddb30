"""The time of a log step covers everything since the last one, writing the lines included."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trainer.engine.records import journal
from trainer.engine.records.journal import Journal
from trainer.errors import ConfigError, DataError, ExitCode, NoSpaceError, TrainerError
from trainer.telemetry.rundir import LOCK_FILE, HeldFolder
from trainer.telemetry.sinks.metrics import METRICS_FILE
from trainer.telemetry.sinks.records import METRICS_LOG


class Clock:
    """Stands for the module `time`: every reading is one second after the last."""

    now = 0.0

    def monotonic(self) -> float:
        """The next second."""
        self.now += 1.0
        return self.now


def context_of(run_dir: Path, **more: Any) -> Any:
    """A run on a CPU."""
    config = SimpleNamespace(family="x", method="lora", train=SimpleNamespace(max_train_steps=9))
    plan = SimpleNamespace(decisions=(), budget_bytes=17 * 1024**3, ranks=2, peak_tflops=100.0)
    return SimpleNamespace(run_dir=run_dir, config=config, plan=plan, device="cpu", **more)


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    """A journal of a run on a CPU whose clock ticks when it is read."""
    monkeypatch.setattr(journal, "time", Clock())
    with Journal(context_of(tmp_path), tmp_path / "runtime") as made:
        yield made


def take_step(book: Journal, step: int) -> None:
    values = {"loss": 1.0, "learning_rate": 1e-4, "grad_norm": 1.0}
    counts = {"step": step, "steps": 1, "samples": 2, "tokens": 0, "learned_tokens": 0}
    book.log_step(**values, **counts, flops=5e13, computed=0.75, validation=None)


def log(book: Journal, step: int) -> dict[str, Any]:
    take_step(book, step)
    row: dict[str, Any] = json.loads((book.context.run_dir / METRICS_LOG).read_text().splitlines()[-1])
    return row


def test_the_next_step_pays_for_writing_the_line(book: Journal) -> None:
    clock: Any = journal.time
    book.start_clock()
    assert log(book, 1)["seconds_per_step"] == 1.0
    # read once a log step: a second reading, after the writing, would leave that out of the next step's time
    assert clock.now == 3.0
    row = log(book, 2)
    assert (row["seconds_per_step"], row["samples_per_second"]) == (1.0, 2.0)
    with book.untimed():
        clock.now += 7.0
    # three readings since the last line, one of them at the end of what is left out
    assert log(book, 3)["seconds_per_step"] == 2.0


def test_model_flops_are_of_all_gpus_and_a_share_of_all_their_peaks(book: Journal) -> None:
    book.start_clock()
    row = log(book, 1)
    assert (row["model_tflops"], row["mfu"], row["compute_seconds_per_step"]) == (50.0, 0.25, 0.75)
    text = (book.context.run_dir / "runtime" / METRICS_FILE).read_text()
    assert "trainer_compute_step_seconds 0.75" in text
    assert "trainer_model_tflops 50.0" in text and "trainer_mfu_ratio 0.25" in text
    book.context.plan.peak_tflops = 0.0
    row = log(book, 2)
    assert row["model_tflops"] == 50.0 and row.get("mfu") is None


def test_the_plans_budget_is_published_before_the_first_step(book: Journal) -> None:
    text = (book.context.run_dir / "runtime" / METRICS_FILE).read_text()
    published = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert published["trainer_memory_budget_bytes"] == 17 * 1024**3


def test_a_cpu_has_no_device_memory(book: Journal) -> None:
    book.start_clock()
    row = log(book, 1)
    names = ("peak_bytes", "reserved_bytes", "reserved_peak_bytes")
    assert {row[f"device_memory_{name}"] for name in names} == {0}


@pytest.mark.parametrize("again", [False, True], ids=["removed", "another run's"])
def test_a_run_whose_folder_is_gone_saves_and_ends_where_no_other_has_begun(
    tmp_path: Path, again: bool
) -> None:
    """Its records go into files without a name, and another run could begin in a folder of that name."""
    run_dir, said, stop = tmp_path / "run", list[str](), SimpleNamespace(requested=None)
    run_dir.mkdir()
    (run_dir / LOCK_FILE).write_text('{"supervisor": 7}')
    with Journal(context_of(run_dir, say=said.append, stop=stop), tmp_path / "runtime") as made:
        log(made, 1)
        assert (said, stop.requested) == ([], None)
        shutil.rmtree(run_dir)
        if again:
            run_dir.mkdir()
            (run_dir / LOCK_FILE).write_text('{"supervisor": 8}')
            with pytest.raises(ConfigError, match="another run has this folder now"):
                take_step(made, 2)
            assert stop.requested is None
            return
        for step in (2, 3):
            take_step(made, step)
    assert stop.requested is ExitCode.STOPPED
    assert len(said) == 1 and f"{run_dir} was removed while" in said[0]


def test_a_disk_that_does_not_answer_is_no_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK_FILE).write_text('{"supervisor": 7}')
    folder = HeldFolder(tmp_path)
    numbers = iter((errno.EIO, errno.EACCES, errno.ESTALE))

    def broken(path: Path) -> bytes:
        raise OSError(next(numbers), "broken")

    monkeypatch.setattr(Path, "read_bytes", broken)
    assert [folder.is_gone() for _ in range(3)] == [False, False, True]


class Ended:
    """Stands for a tracker that is told how a run ended."""

    said: bool | None = None

    def close(self, *, finished: bool) -> None:
        """Take the word."""
        self.said = finished


@pytest.mark.parametrize("under_way", [None, DataError("a picture is broken")], ids=["well", "by an error"])
@pytest.mark.parametrize("is_full", [False, True], ids=["a disk", "a full disk"])
def test_everything_is_closed_at_the_end_and_no_error_is_hidden(
    is_full: bool, under_way: DataError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tracker: Any = Ended()
    said: list[str] = []
    made = Journal(context_of(tmp_path, say=said.append), tmp_path / "runtime")
    made.tracker = tracker
    ended: TrainerError | None = None
    try:
        with made:
            if is_full:
                monkeypatch.setattr("trainer.telemetry.sinks.records.os.fsync", refuse)
            if under_way is not None:
                raise under_way
    except TrainerError as error:
        ended = error
    monkeypatch.undo()
    assert ended is under_way if under_way or not is_full else isinstance(ended, NoSpaceError)
    assert len(said) == (is_full and under_way is not None)
    assert all("the last records of this run may be missing: " in text for text in said)
    with pytest.raises(ValueError, match="closed file"):
        made.metrics_log.sync()
    assert tracker.said == (ended is None)
