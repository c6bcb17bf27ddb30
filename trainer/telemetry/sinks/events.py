"""TensorBoard event files without torch or TensorFlow, a file per session of a run.

The files are written here and not through tensorboard's EventFileWriter: that one puts the host name and
the process id into the file's name and loses its queue when the process is killed.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any, BinaryIO

from trainer.files import atomic
from trainer.telemetry.sinks.records import Record, ScoreRecord, StepRecord
from trainer.words.sizes import GIB

_PNG_SIZE = struct.Struct(">II")
_RGB = 3
_FILES = "events.out.tfevents.*.trainer"


class EventLog:
    """TensorBoard scalars and images of one run, in one file per session, named by its number."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._file: BinaryIO | None = None

    def record(self, record: Record) -> None:
        """Write the values as one event with a scalar per tag. Raises StorageError."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values: dict[str, float | None] = {}
        if isinstance(record, StepRecord):
            values = {
                "train/loss": record.loss,
                "train/learning_rate": record.learning_rate,
                "train/grad_norm": record.grad_norm,
                "speed/seconds_per_step": record.seconds_per_step,
                "speed/compute_seconds_per_step": record.compute_seconds_per_step,
                "speed/samples_per_second": record.samples_per_second,
                "memory/device_peak_gib": record.device_memory_peak_bytes / GIB,
                "speed/tokens_per_second": record.tokens_per_second,
                "speed/learned_tokens_per_second": record.learned_tokens_per_second,
                "speed/model_tflops": record.model_tflops,
                "speed/mfu": record.mfu,
            }
        if isinstance(record, ScoreRecord):
            values = {f"validation/{name}": value for name, value in record.metrics.items()}
        else:
            values["validation/loss"] = record.validation_loss
            values["validation/perplexity"] = record.validation_perplexity
            values["validation/token_accuracy"] = record.validation_token_accuracy
        scalars = [
            Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None
        ]
        self._write(step=record.step, summary=Summary(value=scalars))

    def image(self, tag: str, path: Path, *, step: int) -> None:
        """Write the picture of a PNG file under `tag`. Raises StorageError."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        png = path.read_bytes()
        width, height = _PNG_SIZE.unpack_from(png, 16)  # IHDR is always the first chunk
        picture = Summary.Image(width=width, height=height, colorspace=_RGB, encoded_image_string=png)
        self._write(step=step, summary=Summary(value=[Summary.Value(tag=tag, image=picture)]))

    def sync(self) -> None:
        """Put every event on the disk. Raises StorageError."""
        if self._file is not None:
            with atomic.no_space_told(self._directory):
                self._file.flush()
                os.fsync(self._file.fileno())

    def restart_after(self, step: int) -> None:
        """Begin a session that follows `step`: TensorBoard drops what older files hold of later steps.

        At -1 the older files are removed. Source: SessionLog.START in tensorboard's event_accumulator.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.close()
        if step < 0:
            for path in self._directory.glob(_FILES):
                path.unlink()
        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def close(self) -> None:
        """Close the file of this session; the next event opens another."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, **values: Any) -> None:
        """Write one event with the fields of the protocol's Event; a session's first one opens its file."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        events = [Event(wall_time=time.time(), **values)]
        with atomic.no_space_told(self._directory):
            if self._file is None:
                # TensorBoard reads the files of a folder in the order of their names
                names = (path.name.split(".") for path in self._directory.glob(_FILES))
                # others may have put copies under names of their own here
                numbers = [int(parts[3]) for parts in names if len(parts) == 5 and parts[3].isdecimal()]
                name = f"events.out.tfevents.{max(numbers, default=0) + 1:010d}.trainer"
                self._file = (self._directory / name).open("xb")
                events.insert(0, Event(wall_time=time.time(), file_version="brain.Event:2"))
            writer = RecordWriter(self._file)
            for event in events:
                writer.write(event.SerializeToString())
            self._file.flush()
