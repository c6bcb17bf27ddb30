"""Every metric in one table, and the training process's registry as text for the supervisor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from trainer.config.secrets import redacted
from trainer.errors import StorageError
from trainer.files import atomic
from trainer.telemetry.sinks.records import Record, ScoreRecord, StepRecord

METRICS_FILE = "metrics.prom"
# fmt: off
_STEP_BUCKETS_SECONDS = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row of the table."""

    name: str
    help: str
    kind: Literal["gauge", "counter", "histogram"] = "gauge"
    labels: tuple[str, ...] = ()
    writer: Literal["run", "supervisor"] = "run"
    """`run` keeps its last value when the training process hangs or dies; `supervisor` is always current."""


# fmt: off
METRICS: tuple[Metric, ...] = (
    Metric(name="trainer_step", help="Optimizer steps done at the last log step."),
    Metric(name="trainer_planned_steps",
           help="Optimizer steps that the run will do in all; those done once it ended early as configured."),
    Metric(name="trainer_loss", help="Training loss, mean since the log step before."),
    Metric(name="trainer_validation_loss",
           help="Loss on held-out samples at fixed noise; absent until this process has measured one."),
    Metric(name="trainer_validation_perplexity",
           help="exp of the loss on held-out samples, of a language model; absent of others."),
    Metric(name="trainer_validation_token_accuracy",
           help="Share of the held-out samples' learned tokens that are the most likely ones; absent of other"
                " families."),
    Metric(name="trainer_validation_score", labels=("metric",),
           help="Metrics of the last previews that were measured, by `validation.metrics`."),
    Metric(name="trainer_learning_rate", help="Learning rate of the last step."),
    Metric(name="trainer_grad_norm", help="Norm of the gradients before clipping."),
    Metric(name="trainer_samples_total", kind="counter",
           help="Samples trained on since the process started."),
    Metric(name="trainer_tokens_total", kind="counter",
           help="Tokens trained on since the process started, without padding, of a language model."),
    Metric(name="trainer_learned_tokens_total", kind="counter",
           help="Those that the loss is on."),
    Metric(name="trainer_tokens_per_second",
           help="Tokens a second of a language model, mean since the log step before; 0 of others."),
    Metric(name="trainer_learned_tokens_per_second", help="Those that the loss is on."),
    Metric(name="trainer_step_seconds", kind="histogram",
           help="Time of an optimizer step; each step counts with the mean since the log step before."),
    Metric(name="trainer_compute_step_seconds",
           help="Forward and backward passes of a step, of several GPUs where they take longest."),
    Metric(name="trainer_model_tflops",
           help="TFLOP a second of the model, recomputation left out, mean since the log step before."),
    Metric(name="trainer_mfu_ratio",
           help="These as a share of the GPUs' bf16 peak by the data sheet; 0 where it is not known."),
    Metric(name="trainer_last_step_timestamp_seconds", help="Unix time of the last log step."),
    Metric(name="trainer_device_memory_peak_bytes", help="Highest device memory allocated by the process."),
    Metric(name="trainer_device_memory_reserved_bytes", help="Device memory held by the allocator now."),
    Metric(name="trainer_memory_budget_bytes",
           help="Device memory that the plan keeps within; on a CPU of the host's."),
    Metric(name="trainer_checkpoint_step", help="Step of the newest valid checkpoint."),
    Metric(name="trainer_cache_entries_total", kind="counter", labels=("origin",),
           help="Cache entries of the data set by origin: reused or encoded."),
    Metric(name="trainer_plan_info", labels=("feature", "value"), help="Decisions of the hardware plan."),
    Metric(name="trainer_build_info", labels=("version", "torch", "family", "method"),
           help="Versions and what is trained."),
    Metric(name="trainer_phase", labels=("phase",), writer="supervisor",
           help="1 for the phase the run is in, 0 for the others."),
    Metric(name="trainer_supervisor_info", labels=("version", "first_rank", "unified_memory"),
           writer="supervisor",
           help="Version of the supervisor, the lowest rank here, and whether CPU and GPU share one memory; a"
                " run of several hosts has its trainer_step and its plan on that of rank 0 alone."),
    Metric(name="trainer_child_up", writer="supervisor", help="1 while all training processes are alive."),
    Metric(name="trainer_rank_heartbeat_timestamp_seconds", labels=("rank",), writer="supervisor",
           help="Unix time of a rank's last heartbeat, in a run of several."),
    Metric(name="trainer_rank_step_seconds", labels=("rank",), writer="supervisor",
           help="Median time of a rank's optimizer steps, in a run of several."),
    Metric(name="trainer_rank_device_memory_reserved_peak_bytes", labels=("rank",), writer="supervisor",
           help="Most device memory that a rank held while it loaded and trained, in a run of several."),
    Metric(name="trainer_healthy", writer="supervisor", help="1 when /healthz says healthy, else 0."),
    Metric(name="trainer_heartbeat_timestamp_seconds", writer="supervisor",
           help="Unix time of the run's last heartbeat, of any rank."),
    Metric(name="trainer_host_memory_available_bytes", writer="supervisor",
           help="MemAvailable of the host, which is also the device's memory on unified memory machines."),
)
# fmt: on


_ONCE_KNOWN = (
    "trainer_loss",
    "trainer_validation_loss",
    "trainer_validation_perplexity",
    "trainer_validation_token_accuracy",
)
"""Gauges that are served from their first value on: 0 would be a perfect loss."""


@dataclass(frozen=True, kw_only=True)
class Registry:
    """A prometheus registry with the table's metrics by kind and name."""

    collector: CollectorRegistry
    gauges: Mapping[str, Gauge]
    counters: Mapping[str, Counter]
    histograms: Mapping[str, Histogram]


def build_registry(writer: Literal["run", "supervisor"]) -> Registry:
    """A fresh registry with the metrics that `writer` owns."""
    # `*_created` would double every counter.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    collector = CollectorRegistry()
    rows = [metric for metric in METRICS if metric.writer == writer]
    return Registry(
        collector=collector,
        gauges={
            m.name: Gauge(m.name, m.help, m.labels, registry=collector) for m in rows if m.kind == "gauge"
        },
        counters={
            m.name: Counter(m.name, m.help, m.labels, registry=collector) for m in rows if m.kind == "counter"
        },
        histograms={
            m.name: Histogram(m.name, m.help, m.labels, registry=collector, buckets=_STEP_BUCKETS_SECONDS)
            for m in rows
            if m.kind == "histogram"
        },
    )


def _known(**values: float | None) -> dict[str, float]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


class RunMetrics:
    """The training process's metrics. Counts and checkpoints come with the next record, or `write`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / METRICS_FILE
        self._registry = build_registry("run")
        self._unknown = set(_ONCE_KNOWN)
        for name in _ONCE_KNOWN:
            self._registry.collector.unregister(self._registry.gauges[name])

    def begin(self, *, build: Mapping[str, str], decisions: Mapping[str, str], budget_bytes: int) -> None:
        """Publish what runs, by the labels of `trainer_build_info`, and its plan: feature -> value, and the
        device memory that it keeps within.
        """
        gauges = self._registry.gauges
        gauges["trainer_build_info"].labels(**build).set(1)
        for feature, value in decisions.items():
            gauges["trainer_plan_info"].labels(feature=feature, value=value).set(1)
        gauges["trainer_memory_budget_bytes"].set(budget_bytes)
        self.write()

    def cache_entries(self, *, reused: int, encoded: int) -> None:
        """Count entries of the cache that were found valid, and that had to be encoded."""
        entries = self._registry.counters["trainer_cache_entries_total"]
        entries.labels(origin="reused").inc(reused)
        entries.labels(origin="encoded").inc(encoded)

    def record(self, record: Record) -> None:
        """Take in the values and the counts, and publish them."""
        values: dict[str, float] = {}
        if isinstance(record, StepRecord):
            values = {
                "trainer_step": record.step,
                "trainer_planned_steps": record.planned_steps,
                "trainer_loss": record.loss,
                "trainer_learning_rate": record.learning_rate,
                "trainer_grad_norm": record.grad_norm,
                "trainer_device_memory_peak_bytes": record.device_memory_peak_bytes,
                "trainer_device_memory_reserved_bytes": record.device_memory_reserved_bytes,
                "trainer_last_step_timestamp_seconds": time.time(),
            }
            values |= _known(
                trainer_compute_step_seconds=record.compute_seconds_per_step,
                trainer_model_tflops=record.model_tflops,
                trainer_mfu_ratio=record.mfu,
                trainer_tokens_per_second=record.tokens_per_second,
                trainer_learned_tokens_per_second=record.learned_tokens_per_second,
            )
            self._registry.counters["trainer_samples_total"].inc(record.samples)
            self._registry.counters["trainer_tokens_total"].inc(record.tokens)
            self._registry.counters["trainer_learned_tokens_total"].inc(record.learned_tokens)
            for _ in range(record.steps):
                self._registry.histograms["trainer_step_seconds"].observe(record.seconds_per_step)
        if isinstance(record, ScoreRecord):
            for metric, value in record.metrics.items():
                self._registry.gauges["trainer_validation_score"].labels(metric=metric).set(value)
        else:
            values |= _known(
                trainer_validation_loss=record.validation_loss,
                trainer_validation_perplexity=record.validation_perplexity,
                trainer_validation_token_accuracy=record.validation_token_accuracy,
            )
        for name, value in values.items():
            self._registry.gauges[name].set(value)
        for name in self._unknown & values.keys():
            self._registry.collector.register(self._registry.gauges[name])
            self._unknown.remove(name)
        self.write()

    def goes_on(self, step: int, planned_steps: int) -> None:
        """Publish the step of the checkpoint that training goes on from, 0 without one, and of the last
        one: a finished run that is started once more logs no other.
        """
        self._registry.gauges["trainer_step"].set(step)
        self._registry.gauges["trainer_planned_steps"].set(planned_steps)
        if step > 0:
            self.checkpoint(step)
        self.write()

    def checkpoint(self, step: int) -> None:
        """Say that a checkpoint of `step` became valid."""
        self._registry.gauges["trainer_checkpoint_step"].set(step)

    def ended_early(self, step: int) -> None:
        """Publish that training ended after `step`, which is all that there will be."""
        for name in ("trainer_step", "trainer_planned_steps"):
            self._registry.gauges[name].set(step)
        self.write()

    def write(self) -> None:
        """Publish all values at once for the supervisor to serve; a full folder keeps the last ones."""
        # the heartbeat, written to the same folder, has told it, or makes the folder again
        with contextlib.suppress(StorageError, FileNotFoundError):
            text = generate_latest(self._registry.collector).decode()
            atomic.write_text(self._path, redacted(text), sync=False)
