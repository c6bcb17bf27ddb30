"""bench matrix: which cells there are, that each is a configuration, and what is read off a run."""

from __future__ import annotations

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench import matrix
from bench.processes import Ended
from bench.record import from_json
from trainer import families
from trainer.config.reading import load
from trainer.errors import DataError
from trainer.machine import description

CELLS = {str(cell): cell for cell in matrix.cells()}


def test_every_family_has_its_default_plan_graphs_and_bf16() -> None:
    for family in families.names():
        assert {f"{family}/{name}" for name in ("default", "compiled, graphs", "bf16")} <= set(CELLS)
    assert len(CELLS) == len(list(matrix.cells()))


@pytest.mark.parametrize("name", [name for name in CELLS if matrix.ONE_LENGTH in name])
def test_a_cell_of_one_length_differs_in_captions_alone_from_the_one_it_is_compared_with(
    name: str, tmp_path: Path
) -> None:
    other = CELLS[name.replace(matrix.ONE_LENGTH, "")]
    alike, usual = (matrix.layer_of(cell, tmp_path / "base", tmp_path) for cell in (CELLS[name], other))
    assert alike["data"].pop("sets") != usual["data"].pop("sets") and alike == usual
    assert usual["train"]["max_train_steps"] == 120 and usual["train"]["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_is_a_configuration_over_the_shipped_one(name: str, tmp_path: Path) -> None:
    cell = CELLS[name]
    layer = matrix.layer_of(cell, tmp_path / "base", tmp_path)
    path = tmp_path / "layer.json"
    path.write_text(json.dumps(layer))
    shipped = matrix.REPOSITORY / "train_configs" / f"{cell.family}_lora.yaml"
    family = families.get(cell.family)
    defaults = {cell.family: family.defaults}
    config = load.load([shipped, path], environ={}, family_defaults=defaults).config
    train = config.train
    samples = train.max_train_steps * train.gradient_accumulation_steps * train.train_batch_size
    assert samples in (40, 120)
    for one in config.data.sets:
        assert Path(one.img_dir or one.chat_file or "").exists()
    if cell.alike:
        captions = {path.read_bytes() for path in Path(config.data.sets[0].img_dir or "").glob("*.txt")}
        assert len(captions) == 1


def test_figures_are_of_the_second_half(tmp_path: Path) -> None:
    plan: dict[str, Any] = {
        "weights": "fp8", "compile": True, "attention": "cudnn", "activation_checkpointing": False,
        "compute": "fp8", "weight_copies": 2, "modulation": "", "recomputed_blocks": 0, "swapped_blocks": 0,
        "sharded_blocks": 0, "shard_group": 1,
        "activation_budget": 1.0, "device": "cuda", "accumulation_steps": 4, "step_milliseconds": 250.4,
        "micro_batch_size": 4, "train_memory": [
            {"name": "base weights", "bytes": 20 * 2**30}, {"name": "activations", "bytes": 40 * 2**30},
        ],
    }  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    seconds = [20.0, 3.0, 1.2, 1.0, 1.0, 1.0, 1.2, 1.0]
    rows = [
        {"step": number, "seconds_per_step": one, "device_memory_reserved_peak_bytes": 61 * 2**30}
        for number, one in enumerate(seconds, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = matrix.run_figures(tmp_path, "12 CUDA graphs of 19 sets of shapes; 6 graphs compiled")
    assert found["ms a micro-batch"] == 250 and found["predicted"] == 250
    assert found["steady after"] == 8 and found["graphs"] == "12 of 19" and found["compiled"] == 6
    assert (found["peak GiB"], found["planned"]) == (61.0, 60.0)
    one = matrix.run_figures(tmp_path, "1 CUDA graph of 1 set of shapes; 1 graph compiled")
    assert (one["graphs"], one["compiled"]) == ("1 of 1", 1)
    fewer = matrix.run_figures(tmp_path, "computed together: 3.1 micro-batches a step, of 1 to 3 samples")
    assert fewer["planned"] == 60 - 10.2
    assert matrix.run_figures(tmp_path, "together: 1.0 micro-batches a step, of 3 samples") == fewer


def test_rows_of_other_cells_stay(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = matrix.parser().parse_args(
        ["--work", str(tmp_path), "--record", str(record), "--month", "2026-11"]
    )
    here = description.describe("2026-11")
    for family, result in (("flux1_dev", "proved"), ("llama", "refused"), ("flux1_dev", "exit code 1")):
        matrix.write_record(options, [{"family": family, "cell": "default", "result": result}], here)
    table: Any = from_json(record.read_text(), "record")
    assert table.machine == here
    assert [(row[0], row[3]) for row in table.rows] == [("flux1_dev", "exit code 1"), ("llama", "refused")]


def test_rows_of_another_machine_stay_in_their_record(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = matrix.parser().parse_args(["--work", str(tmp_path), "--record", str(record)])
    there = description.describe("2026-10")
    rows: list[dict[str, str]] = [{"family": name, "cell": "default"} for name in ("flux1_dev", "llama")]
    matrix.write_record(options, rows, there)
    before, other = record.read_bytes(), dataclasses.replace(there, torch="0.1")
    with pytest.raises(DataError, match=r"1 of its rows were not measured again.*torch"):
        matrix.write_record(options, rows[:1], other)
    assert record.read_bytes() == before
    matrix.write_record(options, rows[:1], dataclasses.replace(there, month="2026-12"))
    table: Any = from_json(record.read_text(), "record")
    assert table.machine == dataclasses.replace(there, month="2026-10 to 2026-12")
    matrix.write_record(options, rows[:1], dataclasses.replace(there, month="2026-11"))
    again: Any = from_json(record.read_text(), "record")
    assert again.machine == table.machine
    matrix.write_record(options, rows, other)  # all were measured there
    table = from_json(record.read_text(), "record")
    assert table.machine == other


def test_two_gpus_have_no_family_together() -> None:
    first, second, third = (matrix.Cell(family=name, name=name, features={}) for name in "aab")
    wanted = [first, second, third]
    turns = matrix._Turns(wanted, time.monotonic() + 60)
    assert [turns.take(), turns.take()] == [first, third]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(turns.take)
        turns.give_back(third)
        assert not waiting.done() and wanted == [second]
        turns.give_back(first)
        assert waiting.result(timeout=30) is second
    assert turns.take() is None
    late = matrix._Turns([first], time.monotonic() - 1)
    assert late.take() is None


def test_a_cell_that_is_run_again_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = CELLS["flux1_dev/default"]
    run = tmp_path / "flux1_dev-default" / "run"
    run.mkdir(parents=True)
    for left in (run / "metrics.jsonl", run.with_name("run.txt")):
        left.write_text("of the run before\n")
    run.with_name("run.runtime").mkdir()

    def train(*_: object) -> Ended:
        assert [path.name for path in run.parent.iterdir()] == ["layer.yaml"]
        return Ended(code=1, host_gib=1.0, said="")

    monkeypatch.setattr(matrix.jobs, "train", train)
    assert matrix._run(cell, tmp_path, "0")["result"] == "exit code 1"


def test_gpus_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 8})
    assert [matrix.share_of_cores(number, 2) for number in (0, 1)] == [{0, 1}, {2, 3}]
    assert matrix.share_of_cores(0, 1) == {0, 1, 2, 3, 8}
    assert matrix.share_of_cores(6, 7) == {0, 1, 2, 3, 8}
