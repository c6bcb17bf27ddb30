"""metrics.jsonl and its cut-back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainer.telemetry.sinks.records import (
    MetricsLog,
    StepRecord,
    ValidationRecord,
    cut_torn_line,
    held_out_line,
    read_lines,
    read_metrics,
)


def record(step: int, *, loss: float = 0.5, validation_loss: float | None = None) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        learning_rate=1e-4,
        grad_norm=2.0,
        seconds_per_step=0.25,
        samples_per_second=4.0,
        device_memory_peak_bytes=123,
        validation_loss=validation_loss,
    )


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_a_line_per_record_is_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    log.record(record(10))
    log.record(record(20, loss=float("nan"), validation_loss=0.75))
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["step"], first["loss"], first["device_memory_peak_bytes"]) == (10, 0.5, 123)
    assert "validation_loss" not in first
    assert (second["loss"], second["validation_loss"]) == (None, 0.75)
    log.close()


def test_lines_are_on_the_disk_after_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is saved after it: after a power cut no step before the checkpoint's is missing."""
    path, synced = tmp_path / "metrics.jsonl", list[int]()
    log = MetricsLog(path)
    log.record(record(1))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    log.sync()
    assert synced == [path.stat().st_size] != [0]
    log.close()


def test_a_torn_last_line_is_dropped_on_reopening(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.record(record(1))
    log.close()
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert steps(path) == [1]
    log = MetricsLog(path)
    log.record(record(2))
    log.sync()
    log.close()
    assert steps(path) == [1, 2]


def test_truncation_drops_later_steps_and_the_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 8):
        log.record(record(step))
    log.truncate_after(5)
    assert steps(path) == [1, 2, 3, 4, 5]
    log.record(record(6, loss=0.25))
    log.close()
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert read_metrics(path)[-1]["loss"] == 0.25
    assert list(tmp_path.iterdir()) == [path]


def test_truncation_to_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.record(record(1))
    log.truncate_after(0)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_what_was_measured_before_the_first_step_is_a_line_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.record(ValidationRecord(step=0, validation_loss=float("inf"), validation_data="a"))
    log.record(record(1))
    log.truncate_after(0)
    assert read_metrics(path) == [{"step": 0, "validation_loss": None, "validation_data": "a"}]
    log.truncate_after(-1)
    log.close()
    assert read_metrics(path) == []


def measured(step: int, loss: float | None, data: str | None = "a") -> dict[str, object]:
    row: dict[str, object] = {"step": step, "validation_loss": loss}
    return row | ({} if data is None else {"validation_data": data})


def words(perplexity: float | None, accuracy: float) -> dict[str, object]:
    return {"validation_perplexity": perplexity, "validation_token_accuracy": accuracy}


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([], None),
        ([{"step": 10, "loss": 0.5}], None),
        (
            [measured(0, 0.4123), {"step": 5}, measured(10, 0.3), measured(20, 0.1712)],
            "held-out loss 0.412 -> 0.171 (-58 %)",
        ),
        ([measured(0, 0.4), measured(20, 0.402)], "held-out loss 0.4 -> 0.402 (+0.5 %)"),
        ([measured(0, 0.4, None), measured(20, 0.2, None)], "held-out loss 0.4 -> 0.2 (-50 %)"),
        ([measured(10, 0.4), measured(20, 0.2)], "held-out loss 0.4 -> 0.2 (-50 %) since step 10"),
        (
            [measured(0, 0.9, "b"), measured(10, 0.4), measured(20, 0.2)],
            "held-out loss 0.4 -> 0.2 (-50 %) since step 10",
        ),
        ([measured(0, 0.9, "b"), measured(20, 0.2)], "held-out loss 0.2"),
        ([measured(0, None), measured(20, 0.2)], "held-out loss not finite -> 0.2"),
        ([measured(0, 0.2), measured(20, None)], "held-out loss 0.2 -> not finite"),
        (
            [measured(0, 2.0) | words(7.389, 0.25), measured(20, 1.0) | words(2.718, 0.6251)],
            "held-out loss 2 -> 1 (-50 %), perplexity 7.39 -> 2.72, token accuracy 25.0 % -> 62.5 %",
        ),
        (
            [measured(0, 0.9, "b") | words(2.5, 0.1), measured(20, 1.0) | words(2.718, 0.6)],
            "held-out loss 1, perplexity 2.72, token accuracy 60.0 %",
        ),
        # a checkpoint of an older trainer
        (
            [measured(0, 2.0), measured(20, 1.0) | words(2.718, 0.6)],
            "held-out loss 2 -> 1 (-50 %), perplexity 2.72, token accuracy 60.0 %",
        ),
        (
            [measured(0, 2.0) | words(7.389, 0.25), measured(20, None) | words(None, 0.0)],
            "held-out loss 2 -> not finite, perplexity 7.39 -> not finite, token accuracy 25.0 % -> 0.0 %",
        ),
    ],
)
def test_the_held_out_loss_is_compared_with_what_was_measured_alike(
    rows: list[dict[str, object]], line: str | None
) -> None:
    assert held_out_line(rows) == line


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b"torn", b""),
        (b"whole\n", b"whole\n"),
        (b"whole\ntorn", b"whole\n"),
        (b"w\n" + b"t" * 200_000, b"w\n"),
        (b"t" * 200_000, b""),
    ],
)
def test_only_what_follows_the_last_newline_is_cut(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(before)
    cut_torn_line(path)
    assert path.read_bytes() == after


DAMAGED = (
    b"\0" * 40,
    b"[1, 2]",
    b'{"step": 3, "lo',
    b'{"loss": 1.0}',
    b'{"step": "3"}',
    b'{"step": 3, "loss": "x"}',
)


@pytest.mark.parametrize("line", DAMAGED)
def test_damaged_lines_are_left_out_and_kept_beside(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.record(record(1))
    log.record(record(2))
    first, second = path.read_bytes().splitlines(keepends=True)
    damaged = first + line + b"\n" + second
    path.write_bytes(damaged)
    assert steps(path) == [1, 2]
    assert [row for _, row in read_lines(path)].count(None) == 1
    assert log.truncate_after(1) == (1, "metrics.jsonl.damaged")
    assert path.read_bytes() == first
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged
    assert log.truncate_after(1) == (0, "")
    path.write_bytes(line + b"\n")
    assert log.truncate_after(1) == (1, "metrics.jsonl.damaged-2")
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged, "the only copy of its lines"
    log.close()
