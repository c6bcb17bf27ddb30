"""TensorBoard files as TensorBoard reads them, and what a resumed run makes it forget."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.telemetry.sinks.events import EventLog
from trainer.telemetry.sinks.records import ValidationRecord

from .test_records import record


def png(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, 2 * side), (200, 10, side)).save(buffer, "PNG")
    return buffer.getvalue()


def written(directory: Path, steps: range) -> EventLog:
    log = EventLog(directory)
    log.restart_after(-1)
    for step in steps:
        log.record(record(step, loss=step / 8))
        picture = directory.with_name(f"{directory.name}.png")
        picture.write_bytes(png(step + 1))
        log.image("samples", picture, step=step)
    return log


def read(directory: Path) -> tuple[list[tuple[int, float]], list[int]]:
    """(step, loss) of every loss and the steps of the pictures, as TensorBoard shows them."""
    accumulator = EventAccumulator(str(directory), size_guidance={"images": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    losses = accumulator.Scalars("train/loss") if "train/loss" in tags["scalars"] else []
    pictures = accumulator.Images("samples") if "samples" in tags["images"] else []
    return [(event.step, event.value) for event in losses], [event.step for event in pictures]


def test_tensorboard_reads_scalars_and_pictures(tmp_path: Path) -> None:
    log = written(tmp_path, range(3))
    log.record(ValidationRecord(step=0, validation_loss=0.75, validation_data="a"))
    log.record(record(3, validation_loss=0.5))
    log.sync()
    log.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("validation/loss")] == [
        (0, 0.75),
        (3, 0.5),
    ]
    assert accumulator.Scalars("train/learning_rate")[0].value == pytest.approx(1e-4)
    pictures = [
        (image.width, image.height, image.encoded_image_string) for image in accumulator.Images("samples")
    ]
    assert pictures == [(1, 2, png(1)), (2, 4, png(2)), (3, 6, png(3))]
    assert read(tmp_path)[0] == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.5)]


def test_later_steps_are_forgotten_and_the_next_session_follows_them(tmp_path: Path) -> None:
    written(tmp_path, range(1, 9)).close()
    log = EventLog(tmp_path)
    log.restart_after(5)
    assert read(tmp_path) == ([(step, step / 8) for step in range(1, 6)], [1, 2, 3, 4, 5])
    log.record(record(6, loss=100.0))
    log.close()
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert names == ["events.out.tfevents.0000000001.trainer", "events.out.tfevents.0000000002.trainer"]
    assert read(tmp_path)[0][-2:] == [(5, 0.625), (6, 100.0)]
    log.restart_after(3)  # a second kill and resume, from an older checkpoint
    log.record(record(4, loss=200.0))
    log.close()
    assert read(tmp_path)[0] == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 200.0)]


@pytest.mark.parametrize("torn_bytes", [1, 3, 100])
def test_a_record_cut_short_by_a_crash_is_left_out(tmp_path: Path, torn_bytes: int) -> None:
    written(tmp_path, range(4)).close()
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-torn_bytes])
    log = EventLog(tmp_path)
    log.restart_after(2)
    log.record(record(3, loss=9.0))
    log.close()
    assert read(tmp_path) == ([(0, 0.0), (1, 0.125), (2, 0.25), (3, 9.0)], [0, 1, 2])


def test_a_fresh_start_keeps_nothing_and_can_be_read(tmp_path: Path) -> None:
    log = written(tmp_path, range(2))
    log.restart_after(-1)
    assert read(tmp_path) == ([], [])
    log.record(record(0, loss=0.5))
    log.close()
    assert read(tmp_path) == ([(0, 0.5)], [])
    assert len(list(tmp_path.iterdir())) == 1


def test_damage_and_files_of_others_do_not_stop_a_resume(tmp_path: Path) -> None:
    written(tmp_path, range(4)).close()
    [path] = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(b"\xff" * 64)  # a record of 2^64 bytes
    (tmp_path / "events.out.tfevents.copy.trainer").write_bytes(b"\x04" + b"\0" * 11 + b"\xff" * 8)
    (tmp_path / "old tfevents").mkdir()
    log = EventLog(tmp_path)
    log.restart_after(3)
    log.record(record(4, loss=0.5))
    log.close()
    (tmp_path / "old tfevents").rmdir()
    assert [step for step, _ in read(tmp_path)[0]] == [0, 1, 2, 3, 4]


def test_neither_torch_nor_tensorflow_is_imported(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from trainer.telemetry.sinks.events import EventLog
from trainer.telemetry.sinks.records import ValidationRecord
from trainer.telemetry.sinks.records import StepRecord
assert "tensorboard" not in sys.modules
log = EventLog(Path({str(tmp_path)!r}))
log.record(StepRecord(
    step=1, loss=1.0, learning_rate=1.0, grad_norm=1.0, seconds_per_step=1.0, samples_per_second=1.0))
log.restart_after(1)
assert "torch" not in sys.modules and "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_tensorboard_has_perplexity_accuracy_and_tokens(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.restart_after(-1)
    first = ValidationRecord(
        step=0,
        validation_loss=1.0,
        validation_data="a",
        validation_perplexity=2.75,
        validation_token_accuracy=0.5,
    )
    log.record(first)
    step = record(3, validation_loss=0.5)
    log.record(dataclasses.replace(step, tokens_per_second=64.0, learned_tokens_per_second=16.0))
    log.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    found = {tag: [one.value for one in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}
    assert found["validation/perplexity"] == [2.75] and found["validation/token_accuracy"] == [0.5]
    assert found["speed/tokens_per_second"] == [64.0] and found["speed/learned_tokens_per_second"] == [16.0]
