"""The table of metrics, and what the training process publishes."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trainer.telemetry.sinks.metrics import (
    METRICS,
    METRICS_FILE,
    RunMetrics,
    build_registry,
)
from trainer.telemetry.sinks.records import ValidationRecord
from trainer.telemetry.status import Phase, StatusWriter, rank_folder, read_ranks, verdict
from trainer.telemetry.supervising.server import metrics_text

from .test_records import record

BUILD = {"version": "0.1.0", "torch": "2.13.0", "family": "flux1_dev", "method": "lora"}


def full_text(directory: Path) -> str:
    metrics = RunMetrics(directory)
    metrics.begin(
        build=BUILD,
        decisions={"attention": "flash", "weights": 'int8 "quoted"\nline'},
        budget_bytes=17 * 1024**3,
    )
    metrics.cache_entries(reused=7, encoded=3)
    for one in (record(10, validation_loss=0.75), record(20, loss=0.25)):
        of_tokens = {"validation_perplexity": 2.0, "validation_token_accuracy": 0.5}
        metrics.record(dataclasses.replace(one, planned_steps=100, steps=10, samples=40, **of_tokens))
    metrics.checkpoint(20)
    metrics.write()
    StatusWriter(directory, ranks=2).beat(Phase.TRAIN, step=20, median_step_seconds=0.25)
    other = StatusWriter(rank_folder(directory, 1))
    other.device_memory = lambda: 3 * 1024**3
    other.beat(Phase.TRAIN, step=20, median_step_seconds=0.5)
    ranks = read_ranks(directory)
    return metrics_text(
        directory,
        version="0.1.0",
        child_up=True,
        verdict=verdict(None, 0.0),
        ranks=ranks,
        first_rank=0,
        unified_memory=False,
        available=5,
    )


def test_a_held_out_loss_before_the_first_step_is_served(tmp_path: Path) -> None:
    metrics = RunMetrics(tmp_path)
    metrics.record(ValidationRecord(step=0, validation_loss=0.875, validation_data="a"))
    assert "trainer_validation_loss 0.875\n" in (tmp_path / METRICS_FILE).read_text()


def test_no_loss_is_served_before_one_was_measured(tmp_path: Path) -> None:
    """0 would be a perfect one; after a resume too, until the next round."""
    metrics = RunMetrics(tmp_path)
    metrics.goes_on(60, 100)
    losses = {"trainer_loss", "trainer_validation_loss", "trainer_validation_perplexity"}

    def served() -> set[str]:
        families = text_string_to_metric_families((tmp_path / METRICS_FILE).read_text())
        return losses & {sample.name for family in families for sample in family.samples}

    assert served() == set()
    metrics.record(record(70, loss=0.5))
    assert served() == {"trainer_loss"}
    metrics.record(record(80, loss=0.5, validation_loss=0.75))
    assert served() == {"trainer_loss", "trainer_validation_loss"}


def test_every_metric_of_the_table_is_served_with_its_value(tmp_path: Path) -> None:
    families = list(text_string_to_metric_families(full_text(tmp_path)))
    served = {(family.name.removesuffix("_total"), family.type) for family in families}
    assert served == {(metric.name.removesuffix("_total"), metric.kind) for metric in METRICS}
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    assert values["trainer_step",] == 20
    assert values["trainer_loss",] == 0.25
    assert values["trainer_validation_loss",] == 0.75
    assert values["trainer_samples_total",] == 80
    assert values["trainer_step_seconds_count",] == 20
    assert values["trainer_step_seconds_sum",] == pytest.approx(5.0)
    assert values["trainer_checkpoint_step",] == 20
    assert values["trainer_memory_budget_bytes",] == 17 * 1024**3
    assert values["trainer_cache_entries_total", ("origin", "reused")] == 7
    assert values["trainer_phase", ("phase", "train")] == 1
    assert sum(value for key, value in values.items() if key[0] == "trainer_phase") == 1
    assert values["trainer_build_info", *sorted(BUILD.items())] == 1
    assert values["trainer_plan_info", ("feature", "attention"), ("value", "flash")] == 1
    assert values["trainer_host_memory_available_bytes",] == 5
    assert values["trainer_rank_step_seconds", ("rank", "1")] == 0.5
    held = "trainer_rank_device_memory_reserved_peak_bytes"
    assert values[held, ("rank", "1")] == 3 * 1024**3
    assert (held, ("rank", "0")) not in values, "it has not loaded yet"


def test_each_value_of_a_record_is_served_under_its_own_name(tmp_path: Path) -> None:
    wanted = {
        "step": 30, "planned_steps": 100, "loss": 0.5, "learning_rate": 0.125, "grad_norm": 2.5,
        "device_memory_peak_bytes": 7, "device_memory_reserved_bytes": 8, "model_tflops": 9.5,
        "tokens_per_second": 11.5, "learned_tokens_per_second": 12.5, "validation_loss": 13.5,
        "validation_perplexity": 14.5, "validation_token_accuracy": 0.75,
    }  # fmt: skip
    counts = {"samples": 21, "tokens": 22, "learned_tokens": 23}
    one = dataclasses.replace(record(30), **wanted, **counts, mfu=0.25, compute_seconds_per_step=0.375)
    metrics = RunMetrics(tmp_path)
    metrics.record(one)
    metrics.record(one)
    families = text_string_to_metric_families((tmp_path / METRICS_FILE).read_text())
    served = {sample.name: sample.value for family in families for sample in family.samples}
    assert {name: served[f"trainer_{name}"] for name in wanted} == wanted
    assert {name: served[f"trainer_{name}_total"] / 2 for name in counts} == counts
    assert (served["trainer_mfu_ratio"], served["trainer_compute_step_seconds"]) == (0.25, 0.375)


def test_promtool_accepts_the_text(promtool: str, tmp_path: Path) -> None:
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=full_text(tmp_path), capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize("step", [0, 100])
def test_a_run_that_goes_on_has_its_step_from_the_start(tmp_path: Path, step: int) -> None:
    """A finished one trains no other, and is no run that ended before its last step."""
    RunMetrics(tmp_path).goes_on(step, 100)
    families = text_string_to_metric_families((tmp_path / METRICS_FILE).read_text())
    served = {sample.name: sample.value for family in families for sample in family.samples}
    assert (served["trainer_step"], served["trainer_planned_steps"]) == (step, 100)
    assert served["trainer_checkpoint_step"] == step


def test_nothing_is_published_before_write(tmp_path: Path) -> None:
    RunMetrics(tmp_path).checkpoint(5)
    assert list(tmp_path.iterdir()) == []


def test_names_follow_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("trainer_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
    names = {writer: set(build_registry(writer).gauges) for writer in ("run", "supervisor")}
    assert not names["run"] & names["supervisor"]
