"""`trainer compare` of real runs, two processes each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.record import from_json
from tests.contract.runs import CPU_FACTS
from tests.e2e.conftest import common_environment
from tests.e2e.nursery import ALL_RANKS, Nursery
from trainer.telemetry.measurement import Table
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_of_the_quickstart_are_compared(nursery: Callable[..., Nursery], tmp_path: Path) -> None:
    """The same samples in the same order: before the first update, losses of two ranks of LoRA are equal.

    Its ten training processes are forked: tests/unit/comparing starts and ends processes of a comparison.
    """
    words = [
        "compare", "train_configs/quickstart.yaml", "--vary", "lora.rank=2,8", "--gpus", "2",
        "--steps", "3", "--warmup", "1", "--rounds", "1", "--learn", "4",
        "--set", "train.train_batch_size=2", "--set", "data.resolution=64",
        "--output", str(tmp_path / "runs"), "--json", str(tmp_path / "a.json"),
        "--plot", str(tmp_path / "a.png"),
    ]  # fmt: skip
    environ = common_environment() | {
        "TRAINER_FACTS": str(CPU_FACTS),
        "TRAINER_CACHE_DIR": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path),
        ALL_RANKS: "1",
    }
    ended = nursery(alternate=True).run(["-m", "trainer", *words], environ)
    assert ended.returncode == 0, ended.stderr
    assert "A and B: the plans are equal" in ended.stdout.splitlines()[0]
    assert "the configurations differ in lora.rank (2, 8)" in ended.stdout
    assert "planned otherwise" not in ended.stderr
    assert "another seed of A was run: its last 4 losses are " in ended.stdout
    runs = {path.name: path for path in (tmp_path / "runs").iterdir() if path.is_dir()}
    assert set(runs) >= {"round-1-A", "round-1-B", "learn-A", "learn-B", "learn-A-with-another-seed"}
    assert not list((tmp_path / "runs").glob("*.runtime")) and not list(tmp_path.glob("trainer-compare-*"))
    losses = {name: [row["loss"] for row in read_metrics(path / METRICS_LOG)] for name, path in runs.items()}
    assert losses["round-1-A"] == losses["learn-A"], "runs of one variant and as many steps are equal"
    assert losses["learn-A"][0] == losses["learn-B"][0] != losses["learn-A-with-another-seed"][0]
    assert losses["learn-A"][1:] != losses["learn-B"][1:]
    for name in ("round-1-A", "round-1-B"):
        plan = json.loads((runs[name] / "plan.json").read_text())
        assert plan["ranks"] == 2 and not (runs[name] / "checkpoints").exists()
        assert not (runs[name] / "samples").exists() and len(losses[name]) == 4
    record = from_json((tmp_path / "a.json").read_text(), "a.json")
    assert isinstance(record, Table) and [row[0] for row in record.rows] == ["A lora.rank=2", "B lora.rank=8"]
    cells = [dict(zip(record.columns, row, strict=True)) for row in record.rows]
    times = sorted(1e3 * row["seconds_per_step"] for row in read_metrics(runs["round-1-A"] / METRICS_LOG)[1:])
    assert cells[0]["ms/step, median"] == f"{times[1]:,.1f}"
    assert re.match(r"learns (the same|worse|more): last 4 losses", cells[1]["learned"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
