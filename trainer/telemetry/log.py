"""The log of a run: JSON lines in log.jsonl for machines, short lines on stderr for people.

`extra={"fields": {...}}` of a log call adds keys to its line in log.jsonl; stderr shows the message.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from trainer.config.secrets import redacted, shown
from trainer.errors import one_line
from trainer.telemetry.sinks.records import StepRecord, cut_torn_line
from trainer.words.sizes import GIB


def setup(run_dir: Path | None, rank: int = 0, host: int = 0) -> None:
    """Send the loggers of this package to stderr and, with a run folder, to its log.jsonl as well.

    Of a rank but the first only errors are told, which name it: of all else the first one says the same. Of
    another host than the first they are in a log.jsonl of its own: the folder may be a network's.

    Called again it replaces what it set up before: a command can log first and learn its run folder later.
    """
    logger = logging.getLogger("trainer")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.ERROR if rank else logging.INFO)
    logger.propagate = False
    human = _StderrHandler()
    human.setFormatter(_HumanFormatter(f"rank {rank}: " if rank else ""))
    logger.addHandler(human)
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / (f"log-host-{host}.jsonl" if host else "log.jsonl")
        if not rank:
            cut_torn_line(path)
        # a folder's name need not be UTF-8; its bytes then stand as JSON escapes them
        machine = _FileHandler(path, encoding="utf-8", errors="backslashreplace")
        machine.setFormatter(_JsonFormatter({"rank": rank} if rank else {}))
        logger.addHandler(machine)


def step_line(record: StepRecord) -> str:
    """The line of a log step for people: `step  120/1500  loss 0.4123  lr 1.00e-04  ...`."""
    parts = [
        f"step {record.step:>{len(str(record.planned_steps))}}/{record.planned_steps}",
        f"loss {record.loss:.4f}",
        f"lr {record.learning_rate:.2e}",
        f"grad {record.grad_norm:.3f}",
        f"{record.seconds_per_step:.3f} s/step",
        f"{record.samples_per_second:.2f} samples/s"
        if record.tokens_per_second is None
        else f"{record.tokens_per_second:.0f} tokens/s",
    ]
    if record.learned_tokens_per_second is not None:
        parts.append(f"{record.learned_tokens_per_second:.0f} learned/s")
    if record.mfu is not None:
        parts.append(f"{record.model_tflops:.0f} TFLOP/s ({record.mfu:.0%} of bf16's peak)")
    if record.device_memory_peak_bytes:
        parts.append(f"peak {record.device_memory_peak_bytes / GIB:.1f} GiB")
    if record.validation_loss is not None:
        parts.append(f"validation {record.validation_loss:.4f}")
    if record.validation_perplexity is not None:
        parts.append(f"perplexity {record.validation_perplexity:.4g}")
    if record.validation_token_accuracy is not None:
        parts.append(f"token accuracy {100 * record.validation_token_accuracy:.1f} %")
    return "  ".join(parts)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the stderr of the moment, which a live progress bar replaces to print above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _FileHandler(logging.FileHandler):
    """Writes log.jsonl; a disk that takes no more is told once on stderr, and does not end the run.

    What could not be written is kept in the stream's buffer, and follows when there is room again.
    """

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        if not self._told:
            self._told = True
            text = (
                f"warning: {self.baseFilename} cannot be written ({error.strerror}): the run goes on without"
            )
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of the rest, which was told already
            super().close()


class _HumanFormatter(logging.Formatter):
    """`12:30:05 message`, with the level's name from warnings up, after words that are the same each time."""

    def __init__(self, always: str) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        message = record.getMessage()
        if isinstance(record.args, tuple) and record.args:  # no path begins a line of its own
            parts = (one_line(one) if isinstance(one, Path) else one for one in record.args)
            message = str(record.msg) % tuple(parts)
        text = f"{self.formatTime(record, '%H:%M:%S')} {self._always}{level}{message}"
        return shown(f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text)


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, keys that are the same each time, the
    call's fields, traceback.
    """

    def __init__(self, always: Mapping[str, object]) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        row: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        row |= {**self._always, **record.__dict__.get("fields", {})}
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return redacted(json.dumps(row, default=str, ensure_ascii=False))
