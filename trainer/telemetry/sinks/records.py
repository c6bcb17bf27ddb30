"""Records of log steps, and metrics.jsonl, which can be cut back to a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.files import atomic

METRICS_LOG = "metrics.jsonl"
DAMAGED_SUFFIX = ".damaged"


SCORES = ("clip_t", "dinov2", "nearest_train", "copied", "diversity", "kid", "kid_std", "fid")
"""Names of the metrics of previews in ScoreRecord, in the order in which tables show them."""


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
    """A held-out loss. The one before the first step is a line of its own: nothing was trained by then."""

    step: int
    validation_loss: float
    validation_data: str
    """Hash of the samples and settings of the measurement: losses with unequal hashes do not compare."""
    validation_perplexity: float | None = None
    """exp of the held-out loss, which is a mean over learned tokens; None where no tokens are learned."""
    validation_token_accuracy: float | None = None
    """Share of the learned tokens that the model finds most likely; None where no tokens are learned."""


@dataclass(frozen=True, kw_only=True)
class ScoreRecord:
    """Metrics of a round of previews, on a line of its own; those that were not measured are None."""

    step: int
    pictures: int
    score_data: str
    """Hash of models, training pictures, prompts and settings: metrics with unequal hashes do not compare."""
    clip_t: float | None = None
    """Mean cosine of picture and prompt."""
    dinov2: float | None = None
    """Mean cosine of previews to training pictures."""
    nearest_train: float | None = None
    """Highest cosine of a preview to a training picture."""
    copied: int | None = None
    """Previews whose cosine to a training picture is above the threshold."""
    diversity: float | None = None
    """Mean distance of previews of one prompt."""
    kid: float | None = None
    kid_std: float | None = None
    """Standard deviation of `kid` over subsets."""
    fid: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The values that were measured, by name."""
        found = vars(self)
        return {name: found[name] for name in SCORES if found[name] is not None}


@dataclass(frozen=True, kw_only=True)
class EarlyStopRecord:
    """The end of training before its last planned step; of a run that goes on, other rows follow."""

    step: int
    early_stop: str
    """Why, in words."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The values of a log step. Times and rates are means since the log step before."""

    step: int
    """Optimizer steps done."""
    loss: float
    learning_rate: float
    grad_norm: float
    """Norm of the gradients before clipping."""
    seconds_per_step: float
    samples_per_second: float
    compute_seconds_per_step: float | None = None
    """Forward and backward passes of a step, of several GPUs on the one where they took longest, up to one or
    two steps ago; None where no time is known yet. The rest of `seconds_per_step` is the update, what reads
    and writes data and logs, the exchange of gradients and the waits for other GPUs.
    """
    tokens_per_second: float | None = None
    """Tokens a second of a language model, without padding; None for other families."""
    learned_tokens_per_second: float | None = None
    """Tokens a second that the loss is on; None for other families."""
    model_tflops: float | None = None
    """TFLOP a second of the model, by all GPUs together: see `planning.shapes.model_flops`. What is computed
    again counts nothing.
    """
    mfu: float | None = None
    """These as a share of the GPUs' bf16 peak by their maker's data sheet, whatever products are in: FP8 may
    be above 1. None where the peak is not known.
    """
    device_memory_peak_bytes: int = 0
    """Highest allocation so far; 0 on a CPU."""
    device_memory_reserved_bytes: int = 0
    """Held by the allocator now; 0 on a CPU."""
    device_memory_reserved_peak_bytes: int = 0
    """Most that the allocator held so far; 0 on a CPU."""
    validation_loss: float | None = None
    """Held-out loss; None at steps that do not validate."""
    validation_data: str | None = None
    """Hash of what the held-out loss was measured on, as in ValidationRecord; so are the next two."""
    validation_perplexity: float | None = None
    validation_token_accuracy: float | None = None
    steps: int = 1
    """Optimizer steps since the log step before; it and the counts below are for counters, not written
    as values."""
    samples: int = 0
    """Samples since the log step before."""
    tokens: int = 0
    """Tokens since the log step before, of a language model."""
    learned_tokens: int = 0
    """Tokens since the log step before that the loss is on."""
    planned_steps: int = 0
    """Optimizer steps that the run will do in all."""


_COUNTS = frozenset({"steps", "samples", "tokens", "learned_tokens", "planned_steps"})
Record = StepRecord | ValidationRecord | ScoreRecord
"""Records of values; each is a line of metrics.jsonl."""
_FIELDS = (*dataclasses.fields(StepRecord), *dataclasses.fields(ScoreRecord))
_NUMBERS = frozenset(field.name for field in _FIELDS) - _COUNTS - {"validation_data", "score_data"}


def written_values(record: Record | EarlyStopRecord) -> dict[str, Any]:
    """The values of a record by name, without counts and without those that are None."""
    values = dataclasses.asdict(record).items()
    return {name: value for name, value in values if value is not None and name not in _COUNTS}


class MetricsLog:
    """Append-only metrics.jsonl. A line that a crash cut short is dropped when the file is opened again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        self._file = path.open("ab")

    def record(self, record: Record | EarlyStopRecord) -> None:
        """Write one line, readable at once. A value that is not finite becomes null: JSON has no NaN.

        Raises StorageError.
        """
        row = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in written_values(record).items()
        }
        with atomic.no_space_told(self._path):
            self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def sync(self) -> None:
        """Put every line on the disk. Raises StorageError."""
        with atomic.no_space_told(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> tuple[int, str]:
        """Drop the lines of steps above `step`, all or none: the run goes on from that step's checkpoint.

        Gives how many damaged lines were dropped too, and the name of the whole file, which is then kept
        beside it; empty where there were none. Raises StorageError.
        """
        self._file.close()
        lines = read_lines(self._path)
        damaged = sum(row is None for _, row in lines)
        kept = atomic.unused_name(self._path.with_name(self._path.name + DAMAGED_SUFFIX))
        if damaged:
            whole = self._path.read_bytes()
            with atomic.writing(kept) as aside:
                aside.write(whole)
        with atomic.writing(self._path) as file:
            file.writelines(line for line, row in lines if row is not None and row["step"] <= step)
        self._file = self._path.open("ab")
        return damaged, kept.name if damaged else ""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, oldest first, without a half-written last one and without damaged ones."""
    return [row for _, row in read_lines(path) if row is not None]


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """The whole lines of a metrics.jsonl with their rows; None for a line that `MetricsLog` did not write."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [(line, _row(line)) for line in file if line.endswith(b"\n")]


def held_out_line(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """`held-out loss 0.412 -> 0.171 (-58 %)` from a run's rows, of a language model with perplexity and token
    accuracy behind it; None where nothing was measured.

    The first value is the oldest that was measured on what the last one was measured on; `since step N` where
    that was not before training.
    """
    measured = [row for row in rows if "validation_loss" in row]
    if not measured:
        return None
    last = measured[-1]
    first = next(row for row in measured if row.get("validation_data") == last.get("validation_data"))
    before, after, more = first["validation_loss"], last["validation_loss"], of_tokens(last, first)
    if first is last:
        return f"held-out loss {_short(after)}{more}"
    since = f" since step {first['step']}" if first["step"] else ""
    if not before or after is None:
        return f"held-out loss {_short(before)} -> {_short(after)}{since}{more}"
    change = 100 * (after / before - 1)
    percent = f"{change:+.0f}" if abs(change) >= 10 else f"{change:+.1f}"
    return f"held-out loss {_short(before)} -> {_short(after)} ({percent} %){since}{more}"


def of_tokens(last: Mapping[str, Any], first: Mapping[str, Any] | None = None) -> str:
    """`, perplexity 9.1 -> 3.2, token accuracy 41.0 % -> 63.5 %` of two rows, or of the last one alone; empty
    where no tokens are learned.
    """
    earlier: Mapping[str, Any] = {} if first is None or first is last else first
    text = ""
    for name, shown, form in (
        ("validation_perplexity", "perplexity", _short),
        ("validation_token_accuracy", "token accuracy", _percent),
    ):
        if name in last:
            before = f"{form(earlier[name])} -> " if name in earlier else ""
            text += f", {shown} {before}{form(last[name])}"
    return text


def cut_torn_line(path: Path) -> None:
    """Remove the text after the last newline of `path`, which only a crash leaves there."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        text = file.read(path.stat().st_size)  # a device has no size, and may have no end
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            file.truncate(whole)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    numbers = (value for name, value in row.items() if name in _NUMBERS and value is not None)
    return row if all(type(value) in (int, float) for value in numbers) else None


def _percent(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1%}".replace("%", " %")


def _short(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
