"""Planned device memory beside what was measured on an H200: docs/benchmarks/*memory.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.benches import memory
from tests.unit.hardware.conftest import GIB, MACHINES
from trainer import families
from trainer.engine.geometry import CONFIGS

REPOSITORY = Path(__file__).resolve().parents[3]
RECORD = REPOSITORY / "docs" / "benchmarks" / "2026-11-h200-memory.json"
# all are imported before one is changed: a family may take another's values as it is imported
FAMILIES = {name: families.get(name) for name in families.names()}
ROWS = [tuple(row) for row in json.loads(RECORD.read_text())["rows"]]


@pytest.mark.parametrize(
    ("family", "blocks", "setting", "held", "driver"),
    [pytest.param(*row[:5], id=f"{row[0]}: {row[2]}") for row in ROWS],
)
def test_a_plan_is_within_5_percent_of_what_was_measured(
    family: str,
    blocks: str,
    setting: str,
    held: str,
    driver: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINER_FACTS", str(MACHINES / "h200.json"))
    monkeypatch.setenv("TRAINER_PROFILE", "auto")
    # measured while int8 and nf4 bases kept their modulation in bf16
    monkeypatch.setattr(type(FAMILIES[family]), "modulation", ())
    counts = tuple(int(count) for count in blocks.split(","))
    case = memory.Case(family, CONFIGS / family, setting, memory.SETTINGS[setting], counts)
    _, plan = memory.planned(case, tmp_path)
    planned = sum(row.bytes for row in plan.train_memory) / GIB
    assert planned == pytest.approx(float(held) + float(driver), rel=0.05)


def test_many_settings_of_four_families_were_measured() -> None:
    assert len(ROWS) >= 24 and len({row[0] for row in ROWS}) == 4
