"""Full fine-tunes beside torchao's recipes: what is compared, and what is said where it cannot be."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import memory, recipes
from bench.record import from_json
from tests.unit.bench.test_bench import MACHINE
from trainer.errors import HardwareError
from trainer.planning.shapes.run_shapes import CONFIGS
from trainer.telemetry.measurement import Table

MS = {"eager": 150.0, "bf16": 100.0, "fp8": 75.0}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ways in the order in which they were run; torchao's fail."""
    ran: list[str] = []

    def in_child(
        case: memory.Case, job: object, given: Mapping[str, Any], environ: Mapping[str, str]
    ) -> tuple[dict[str, Any], None]:
        ran.append(case.setting)
        if case.setting not in MS:
            return {"failed": "no torchao"}, None
        # the second round is slower by 2 ms
        ms = MS[case.setting] + 2 * (ran.count(case.setting) - 1)
        return {"ms": [ms] * given["steps"], "peak": 80.0}, None

    monkeypatch.setattr(memory, "in_child", in_child)
    monkeypatch.setattr(recipes.idle, "require_gpu", lambda remedy: None)
    monkeypatch.setattr(recipes.description, "describe", lambda month: MACHINE)
    monkeypatch.setattr(recipes.sweep, "probe", lambda case: None)
    return ran


def test_ways_alternate_and_are_compared_with_bf16(tmp_path: Path, measured: list[str]) -> None:
    record = tmp_path / "record.json"
    words = [
        f"llama={CONFIGS / 'llama'}",
        "--ways",
        "eager,bf16,fp8",
        "--steps",
        "4",
        "--record",
        str(record),
    ]
    assert recipes.main(words) == 0
    assert measured == ["eager", "bf16", "fp8"] * 2
    table = from_json(record.read_text(), str(record))
    assert isinstance(table, Table) and table.columns == recipes.COLUMNS
    rows = {row[1]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert [rows[way]["ms a step"] for way in MS] == ["151.0", "101.0", "76.0"]
    assert rows["fp8"]["of bf16"] == "0.752" and rows["fp8"]["fastest to slowest"] == "75 to 77"
    low, high = map(float, rows["fp8"]["95 % of it"].split(" to "))
    assert low + 1e-3 > 75 / 102 and low <= 0.752 <= high and high < 77 / 100 + 1e-3


def test_a_way_that_failed_has_no_row_and_is_told(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"llama={CONFIGS / 'llama'}", "--ways", "bf16,torchao-rowwise", "--rounds", "1"]
    assert recipes.main(words) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["way"] for line in out.splitlines()] == ["bf16"]
    assert "no torchao" in err


def test_each_of_torchaos_recipes_is_a_way_over_our_compiled_plan() -> None:
    names = [name.removeprefix("torchao-") for name in recipes.WAYS if name.startswith("torchao-")]
    assert names == ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
    assert all(recipes.WAYS[f"torchao-{name}"] == recipes.WAYS["bf16"] for name in names)


def test_recomputed_blocks_are_refused_for_torchao() -> None:
    context = argparse.Namespace(plan=argparse.Namespace(activation_checkpointing=True))
    with pytest.raises(HardwareError, match="recomputes blocks"):
        recipes.build_with_torchao(context, "tensorwise")
