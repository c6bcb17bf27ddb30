"""TensorBoard event files without torch or TensorFlow, which can be cut back to a checkpoint.

The records are written here and not through tensorboard's EventFileWriter: that one puts the host name and
the process id into the file's name and loses its queue when the process is killed. A frame (TFRecord) is
`u64 length, u32 crc(length), data, u32 crc(data)`, little endian.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from trainer.files import atomic
from trainer.telemetry.sinks.records import StepRecord, ValidationRecord
from trainer.words.sizes import GIB

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
_PNG_SIZE = struct.Struct(">II")
_RGB = 3
_FILES = "*tfevents*"


class EventLog:
    """TensorBoard scalars and images of one run, in one file per session, named by its number."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._file: BinaryIO | None = None

    def record(self, record: StepRecord | ValidationRecord) -> None:
        """Write the values as one event with a scalar per tag."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values: dict[str, float | None] = {}
        if isinstance(record, StepRecord):
            values = {
                "train/loss": record.loss,
                "train/learning_rate": record.learning_rate,
                "train/grad_norm": record.grad_norm,
                "speed/seconds_per_step": record.seconds_per_step,
                "speed/samples_per_second": record.samples_per_second,
                "memory/device_peak_gib": record.device_memory_peak_bytes / GIB,
                "speed/tokens_per_second": record.tokens_per_second,
            }
        values["validation/loss"] = record.validation_loss
        scalars = [
            Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None
        ]
        self._write(record.step, Summary(value=scalars))

    def image(self, tag: str, path: Path, *, step: int) -> None:
        """Write the picture of a PNG file under `tag`."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        png = path.read_bytes()
        width, height = _PNG_SIZE.unpack_from(png, 16)  # IHDR is always the first chunk
        picture = Summary.Image(width=width, height=height, colorspace=_RGB, encoded_image_string=png)
        self._write(step, Summary(value=[Summary.Value(tag=tag, image=picture)]))

    def sync(self) -> None:
        """Put every event on the disk."""
        if self._file is not None:
            with atomic.no_space_told(self._directory):
                self._file.flush()
                os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> None:
        """Gather the events up to `step` in one new file, without torn records and duplicates; -1 keeps none.

        A crash on the way leaves the old files, or old and new ones: then the next call finds every event
        twice and keeps one, so the outcome is the same.
        """
        self.close()
        # with temporary files that a crash left
        old = sorted(path for path in self._directory.glob(_FILES) if path.is_file())
        if not old:
            return
        seen: set[bytes] = set()
        with atomic.writing(self._next_path()) as file:
            for frame, event in (
                pair for path in old if not path.name.startswith(".") for pair in _frames(path)
            ):
                digest = hashlib.sha256(frame).digest()
                kept = event.step <= step or event.HasField("file_version")
                if kept and digest not in seen:
                    seen.add(digest)
                    file.write(frame)
        for path in old:
            path.unlink()
        atomic.sync_directory(self._directory)

    def close(self, *, finished: bool = True) -> None:
        """Close the file of this session; the next event opens another."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, step: int, summary: Summary) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        with atomic.no_space_told(self._directory):
            first = self._file is None
            if self._file is None:
                self._file = self._next_path().open("xb")
            writer = RecordWriter(self._file)
            if first:
                writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            writer.write(Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())
            self._file.flush()

    def _next_path(self) -> Path:
        """A name after all others: TensorBoard reads the files of a folder in the order of their names."""
        names = (path.name.split(".") for path in self._directory.glob("events.out.tfevents.*.trainer"))
        # others may have put copies under names of their own here
        numbers = [int(parts[3]) for parts in names if len(parts) == 5 and parts[3].isdecimal()]
        return self._directory / f"events.out.tfevents.{max(numbers, default=0) + 1:010d}.trainer"


def _frames(path: Path) -> Iterator[tuple[bytes, Event]]:
    """The whole records of a file, as framed bytes and as a message; one cut short or damaged ends it.

    Checksums are copied, not checked: tensorboard's are plain Python and take 0.1 s per megabyte.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, _ = _HEADER.unpack(header)
            if length > size:
                return
            body = file.read(length + _FOOTER_BYTES)
            if len(body) < length + _FOOTER_BYTES:
                return
            try:
                event = Event.FromString(body[:length])
            except DecodeError:
                return  # where a record ends is not known from here on
            yield header + body, event
