"""bench ranks: what each way asks for, and what is read off the runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import ours, processes, ranks
from bench.record import from_json


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model_index.json").write_text("{}")
    return tmp_path / "base"


def test_ways_alternate_and_their_times_are_compared(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []
    among: list[int] = []

    def train(job: ours.Job, variant: str, folder: Path, shared: Path, **_: Any) -> dict[str, Any]:
        asked.append(job.overrides)
        among.append(job.hosts)
        several = "parallel.gpus=3" in job.overrides
        (folder / "run").mkdir(parents=True)
        plan = {"ranks": 3 if several else 1, "step_milliseconds": 90.0}
        (folder / "run" / "plan.json").write_text(json.dumps(plan))
        times = [110.0, 109.0, 140.0] if several else [100.0, 101.0, 99.0]
        figures = {"times": times, "loss": 1.25, "reserved_gib": 7.0, "planned_gib": 8.0}
        return {"settings": "weights bf16", **figures}

    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    monkeypatch.setattr(ours, "train", train)
    record = tmp_path / "record.json"
    given = ["flux1_dev", "--base", str(base), "--gpus", "3", "--variants", "ours-bf16", "--month", "2026-11"]
    assert ranks.main([*given, "--ways", "one,sharded", "--record", str(record)]) == 0
    one = ("parallel.gpus=1", "train.gradient_accumulation_steps=1")
    three = ("parallel.gpus=3", "train.gradient_accumulation_steps=3", "parallel.shard=full")
    assert asked == [one, three, one, three]
    assert ranks.main([*given, "--ways", "replicated", "--rounds", "1", "--record", str(record)]) == 0
    assert asked[-1] == (*three[:2], "parallel.shard=none")
    assert among == [1] * 5
    assert ranks.main([*given, "--ways", "hosts", "--rounds", "1"]) == 0
    assert (asked[-1], among[-1]) == (three[:2], 3)
    assert ranks.main([*given[:3], *given[5:], "--gpus", "2,3", "--ways", "auto,one", "--rounds", "1"]) == 0
    two = ("parallel.gpus=2", "train.gradient_accumulation_steps=2")
    assert asked[-3:] == [one, two, three[:2]]  # the plan chooses, on two and on three
    table: Any = from_json(record.read_text(), "record")
    rows = {row[2]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert [*rows] == ["one", "sharded", "replicated"]
    assert (rows["one"]["ms a step"], rows["one"]["of one"], rows["one"]["GPUs"]) == ("100.0", "1.000", "1")
    assert (rows["sharded"]["ms a step"], rows["sharded"]["of one"]) == ("110.0", "1.100")
    assert rows["sharded"]["fastest to slowest"] == "109 to 140"
    assert rows["replicated"]["loss"] == "1.250000"
    assert rows["replicated"]["of one"] == ""  # nothing in this call to compare with
    assert "of one" in capsys.readouterr().out


def test_one_is_the_slowest_of_the_gpus_that_the_other_ways_use(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"4": [100.0, 90.0], "7": [110.0, 104.0], "4,7,9": [108.0, 109.0]}
    used: list[tuple[str, Path]] = []

    def train(
        job: ours.Job, variant: str, folder: Path, shared: Path, *, environ: Mapping[str, str]
    ) -> dict[str, Any]:
        gpus = environ[processes.VISIBLE]
        used.append((gpus, shared))
        (folder / "run").mkdir(parents=True)
        plan = {"ranks": 1 if job.overrides[0] == "parallel.gpus=1" else 2, "step_milliseconds": 90.0}
        (folder / "run" / "plan.json").write_text(json.dumps(plan))
        return {"settings": gpus, "loss": 1.25, "times": times[gpus]}

    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    monkeypatch.setenv(processes.VISIBLE, "4,7,9")
    monkeypatch.setattr(ours, "train", train)
    given = ["flux1_dev", "--base", str(base), "--variants", "ours-bf16", "--ways", "one,replicated"]
    assert ranks.main([*given, "--rounds", "1"]) == 0
    one, two = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (one["what the plan chose"], one["ms a step"], one["of one"]) == ("7", "107.0", "1.000")
    assert (two["what the plan chose"], two["of one"]) == ("4,7,9", "1.014")
    assert sorted(gpus for gpus, _ in used) == ["4", "4,7,9", "7"]
    assert len({folder for gpus, folder in used if len(gpus) == 1}) == 2


def test_a_run_that_failed_is_told_and_has_no_row(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    monkeypatch.setattr(ours, "train", lambda *_, **__: {"problem": "exit code 71"})
    record = tmp_path / "record.json"
    given = ["flux1_dev", "--base", str(base), "--ways", "one", "--record", str(record), "--month", "2026-11"]
    assert ranks.main(given) == 1
    table: Any = from_json(record.read_text(), "record")
    assert table.rows == ()
