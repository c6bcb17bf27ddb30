"""Floor 3: metrics.jsonl, one line per log step, which can be cut back to a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.telemetry import atomic

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is known at a log step. Times and rates are means since the log step before."""

    step: int
    """Optimizer steps done."""
    loss: float
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    seconds_per_step: float
    samples_per_second: float
    device_memory_peak_bytes: int = 0
    """Highest allocation so far; 0 on a CPU."""
    device_memory_reserved_bytes: int = 0
    """Held by the allocator now; 0 on a CPU."""
    validation_loss: float | None = None
    """Only at steps that validate."""


class MetricsLog:
    """Append-only metrics.jsonl. A line that a crash cut short is dropped when the file is opened again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        self._file = path.open("ab")

    def append(self, record: StepRecord) -> None:
        """Write one line, readable at once. A value that is not finite becomes null: JSON has no NaN."""
        row = {key: _json_value(value) for key, value in dataclasses.asdict(record).items()}
        if record.validation_loss is None:
            del row["validation_loss"]
        with atomic.no_space_told(self._path):
            self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def flush_and_sync(self) -> None:
        """Put every line on the disk; called before a checkpoint becomes valid."""
        with atomic.no_space_told(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> None:
        """Drop the lines of steps above `step`, all or none: the run goes on from that step's checkpoint."""
        self._file.close()
        kept = [line for line, row in _rows(self._path) if row["step"] <= step]
        atomic.write_bytes(self._path, b"".join(kept))
        self._file = self._path.open("ab")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, oldest first, without a half-written last one."""
    return [row for _, row in _rows(path)] if path.exists() else []


def cut_torn_line(path: Path) -> None:
    """Remove what follows the last newline of `path`, which only a crash leaves there."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - _CHUNK_BYTES)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line, json.loads(line)


def _json_value(value: float | int | None) -> float | int | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
