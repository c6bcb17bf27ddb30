"""Log lines for people and for machines."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.telemetry import log

from .test_records import record


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger("trainer")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.level, logger.propagate = before


def test_errors_of_every_rank_reach_the_log_with_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup(tmp_path)
    logging.getLogger("trainer.run").info("begun")
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"half of a line')  # as rank 0 may be writing it
    log.setup(tmp_path, rank=1)
    logging.getLogger("trainer.run").info("begun")
    logging.getLogger("trainer.run").error("no space", extra={"fields": {"exit_code": 73}})
    text = (tmp_path / "log.jsonl").read_text()
    assert text.count("begun") == 1
    assert text.count('{"half of a line') == 1
    row = json.loads(text[text.index('{"half of a line') + len('{"half of a line') :])
    assert (row["rank"], row["message"], row["exit_code"]) == (1, "no space", 73)
    assert "rank 1: error: no space" in capsys.readouterr().err


def test_people_get_short_lines_and_machines_get_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup(None)
    logging.getLogger("trainer.engine").info("before the run folder")
    log.setup(tmp_path)
    logging.getLogger("trainer.engine").info("step %d", 3, extra={"fields": {"step": 3}})
    logging.getLogger("trainer.data").warning("odd")
    logging.getLogger("trainer.data").debug("hidden")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["before the run folder", "step 3", "warning: odd"]
    first, second = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert (first["logger"], first["level"], first["message"], first["step"]) == (
        "trainer.engine",
        "info",
        "step 3",
        3,
    )
    assert first["time"].endswith("+00:00")
    assert second["level"] == "warning"


def test_a_folder_whose_name_is_not_utf_8_can_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(os.fsdecode(b"/tmp/caf\xe9"))
    log.setup(tmp_path)
    logging.getLogger("trainer.run").info("cache complete in %s", folder)
    assert json.loads((tmp_path / "log.jsonl").read_text())["message"] == f"cache complete in {folder}"
    assert capsys.readouterr().err.endswith("cache complete in /tmp/caf\\udce9\n")


def test_a_traceback_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(tmp_path)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("trainer.engine").exception("failed")
    assert "ValueError: boom" in json.loads((tmp_path / "log.jsonl").read_text())["traceback"]
    assert "error: failed" in capsys.readouterr().err


def test_a_resumed_run_appends_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"message": "first"}\n{"message": "to')
    log.setup(tmp_path)
    logging.getLogger("trainer.engine").info("second")
    assert [json.loads(line)["message"] for line in path.read_text().splitlines()] == ["first", "second"]


def test_the_line_of_a_log_step() -> None:
    row = dataclasses.replace(
        record(120, loss=0.41234),
        device_memory_peak_bytes=3 * 2**30,
        validation_loss=0.5,
        planned_steps=1500,
    )
    assert log.step_line(row) == (
        "step  120/1500  loss 0.4123  lr 1.00e-04  grad 2.000  0.250 s/step  4.00 samples/s  "
        "peak 3.0 GiB  validation 0.5000"
    )
    fast = dataclasses.replace(row, model_tflops=703.4, mfu=0.711)
    assert "4.00 samples/s  703 TFLOP/s (71% of bf16's peak)  peak 3.0 GiB" in log.step_line(fast)
    cpu = dataclasses.replace(record(1), device_memory_peak_bytes=0, planned_steps=5)
    assert "peak" not in log.step_line(cpu)


def test_a_full_disk_under_the_log_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    log.setup(tmp_path)
    for step in range(3):
        logging.getLogger("trainer.engine").info("step %d", step)
    log.setup(None)
    lines = capsys.readouterr().err.splitlines()
    why = "cannot be written (No space left on device): the run goes on without"
    assert [line for line in lines if "warning" in line] == [f"warning: {tmp_path / 'log.jsonl'} {why}"]
    assert [line.split(" ", 1)[1] for line in lines if "warning" not in line] == [
        "step 0",
        "step 1",
        "step 2",
    ]


def test_a_language_models_line_has_tokens_and_what_is_measured_of_them() -> None:
    one = dataclasses.replace(
        record(120, validation_loss=1.25),
        planned_steps=1500,
        tokens_per_second=8123.4,
        learned_tokens_per_second=2045.6,
        validation_perplexity=3.4903,
        validation_token_accuracy=0.6125,
    )
    line = log.step_line(one)
    assert "8123 tokens/s  2046 learned/s" in line and "samples/s" not in line
    assert line.endswith("validation 1.2500  perplexity 3.49  token accuracy 61.3 %")
    assert "perplexity" not in log.step_line(record(120, validation_loss=1.25))
