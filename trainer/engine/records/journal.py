"""The records of a run, written in one call: metrics.jsonl, TensorBoard, Prometheus, a tracker, progress."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from trainer import __version__
from trainer.config.secrets import redacted
from trainer.engine.context import Context
from trainer.errors import ConfigError, ExitCode, StorageError
from trainer.files import atomic
from trainer.modeling.storage.shared_memory import held_bytes
from trainer.telemetry.log import step_line
from trainer.telemetry.run_folder.results import BEST_FOLDER, lora_step
from trainer.telemetry.rundir import HeldFolder
from trainer.telemetry.sinks.events import EventLog
from trainer.telemetry.sinks.metrics import RunMetrics
from trainer.telemetry.sinks.records import (
    METRICS_LOG,
    MetricsLog,
    ScoreRecord,
    StepRecord,
    ValidationRecord,
    read_metrics,
    written_values,
)
from trainer.telemetry.sinks.tracker import Tracker


class Journal:
    """Writers of one run, all cut back to the same step on resume."""

    def __init__(self, context: Context, runtime_dir: Path, tracker: Tracker | None = None) -> None:
        self.context = context
        self.metrics_log = MetricsLog(context.run_dir / METRICS_LOG)
        self.events = EventLog(context.run_dir / "tensorboard")
        self.metrics = RunMetrics(runtime_dir)
        self.tracker = tracker
        self._folder = HeldFolder(context.run_dir)
        sent = () if tracker is None else (tracker,)
        self._pictures: tuple[EventLog | Tracker, ...] = (self.events, *sent)
        self._figures = (self.metrics_log, *self._pictures, self.metrics)
        versions = {"version": __version__, "torch": torch.__version__}
        self.metrics.begin(
            build={**versions, "family": context.config.family, "method": context.config.method},
            decisions={row.feature: row.value for row in context.plan.decisions},
            budget_bytes=context.plan.budget_bytes,
        )
        self.start_clock()

    def cut_back(self, step: int) -> None:
        """Forget all after a checkpoint's step; at 0 everything: a fresh start measures that step again. What
        a run that ended here left is kept aside then. Raises StorageError.
        """
        last_kept = step if step > 0 else -1
        if step == 0:
            self._keep_aside()
        damaged, name = self.metrics_log.truncate_after(last_kept)
        if damaged:
            self.context.say(
                f"{METRICS_LOG}: {damaged} damaged lines are left out; the file as it was is {name}"
            )
        self.events.restart_after(last_kept)
        self.metrics.goes_on(step, self.context.config.train.max_train_steps)

    def _keep_aside(self) -> None:
        """Give the best LoRA and the log of a run that ended here other names, where all is trained again: it
        would take their places at once, and an unfinished run's are worth less. The last LoRA stays until
        its successor is proved.
        """
        run_dir, moved = self.context.run_dir, []
        rows, proved = read_metrics(run_dir / METRICS_LOG), lora_step(run_dir)
        if not rows or rows[-1]["step"] != proved:
            return
        for name in (BEST_FOLDER, METRICS_LOG):
            if (run_dir / name).exists():
                aside = atomic.unused_name(run_dir / f"{name}.earlier")
                with atomic.no_space_told(aside):
                    (run_dir / name).rename(aside)
                moved.append(f"{name} as {aside.name}")
        self.context.say(f"of the run that ended here are kept: {', '.join(moved)}")

    def start_clock(self) -> None:
        """Start timing the steps up to the next log step; previews and saves in between are not steps."""
        self._marked = time.monotonic()

    @contextlib.contextmanager
    def untimed(self) -> Generator[None, None, None]:
        """Leave work that is not training out of the step time."""
        started = time.monotonic()
        yield
        self._marked += time.monotonic() - started

    def publish(self) -> None:
        """Publish counts and checkpoints that no record has brought to the metrics yet."""
        self.metrics.write()

    def log_validation(self, record: ValidationRecord) -> None:
        """Record a held-out loss on a line of its own."""
        for sink in self._figures:
            sink.record(record)

    def log_scores(self, record: ScoreRecord) -> None:
        """Record the metrics of previews on a line of their own; a line that is there already stands."""
        if written_values(record) not in read_metrics(self.context.run_dir / METRICS_LOG):
            for sink in self._figures:
                sink.record(record)

    def log_step(
        self,
        *,
        loss: float,
        learning_rate: float,
        grad_norm: float,
        step: int,
        steps: int,
        samples: int,
        tokens: int,
        learned_tokens: int,
        flops: float,
        computed: float | None,
        validation: ValidationRecord | None,
    ) -> str:
        """Record `steps` steps up to `step`; gives the line for people. `flops` are the model's on all ranks,
        `computed` is the record's `compute_seconds_per_step`, `validation` the held-out loss of this step.
        """
        now = time.monotonic()
        seconds, held, plan = max(now - self._marked, 1e-9), held_bytes(), self.context.plan
        tflops, peak = flops / seconds / 1e12, plan.ranks * plan.peak_tflops
        # of a step that validates its figures too, under the same names
        measured: dict[str, Any] = {"step": step} if validation is None else dataclasses.asdict(validation)
        record = StepRecord(
            **measured,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            seconds_per_step=seconds / steps,
            compute_seconds_per_step=computed,
            samples_per_second=samples / seconds,
            tokens_per_second=tokens / seconds if tokens else None,
            learned_tokens_per_second=learned_tokens / seconds if tokens else None,
            model_tflops=tflops,
            mfu=tflops / peak if peak else None,
            device_memory_peak_bytes=held + torch.cuda.max_memory_allocated(),  # 0 on a CPU, as the next two
            device_memory_reserved_bytes=held + torch.cuda.memory_reserved(),
            device_memory_reserved_peak_bytes=held + torch.cuda.max_memory_reserved(),
            steps=steps,
            samples=samples,
            tokens=tokens,
            learned_tokens=learned_tokens,
            planned_steps=self.context.config.train.max_train_steps,
        )
        for sink in self._figures:
            sink.record(record)
        self.look_at_folder()
        # writing is timed with the next step: nothing that the run waits for is left out of its times
        self._marked = now
        return step_line(record)

    def look_at_folder(self) -> None:
        """Have the run save and end where its folder is gone: another run could begin in a new one.
        Called with each line of the log, and before each checkpoint, kept LoRA and preview.

        Raises ConfigError where one has begun there: nothing is saved among its files.
        """
        if self._folder.is_anothers():
            raise ConfigError(
                "another run has this folder now: it was replaced while this one trained, which saves nothing"
                " into it",
                where=str(self.context.run_dir),
                remedy="to train this one too, start it again with another output_dir",
            )
        if self._folder.is_gone() and self.context.stop.requested is None:
            self.context.say(
                f"warning: {self.context.run_dir} was removed while the run trained: it saves its"
                " step there anew and ends, so that the same command goes on from it; its log, curves and"
                " pictures so far are gone"
            )
            self.context.stop.requested = ExitCode.STOPPED

    def picture(self, tag: str, path: Path, step: int) -> None:
        """Show a PNG where pictures are taken."""
        for sink in self._pictures:
            sink.image(tag, path, step=step)

    def sync(self) -> None:
        """Put everything recorded on the disk, before a checkpoint that relies on it becomes valid."""
        self.metrics_log.sync()
        self.events.sync()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sync and close everything, also where a disk refuses one of them. Raises StorageError then, but not
        in place of an error under way, which says why the run ends.
        """
        lost: StorageError | OSError | None = None
        for end in (self.metrics_log.sync, self.events.sync, self.metrics_log.close, self.events.close):
            try:
                end()
            except (StorageError, OSError) as error:
                lost = lost or error
        if self.tracker is not None:
            self.tracker.close(finished=kind is None and lost is None)
        if lost is None:
            return
        if kind is None:
            raise lost
        self.context.say(f"the last records of this run may be missing: {lost}")


def start_tracker(context: Context) -> Tracker | None:
    """The run at Weights & Biases, where the configuration wants one; raises ConfigError as Tracker."""
    config = context.config
    if config.train.report_to != "wandb":
        return None
    shown = {"family": config.family, "method": config.method}
    shown |= {row.feature: row.value for row in context.plan.decisions}
    shown = {name: redacted(value) for name, value in shown.items()}
    return Tracker(context.run_dir, config.train.tracker_project_name, shown, context.say)
