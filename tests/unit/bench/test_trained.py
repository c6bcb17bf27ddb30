"""bench trained: its parts on small sizes, in turn, and the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import trained
from bench.record import from_json
from trainer.errors import HardwareError


def test_ways_are_measured_in_turn_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trained.torch, "compile", lambda module, **_: module)  # type: ignore[attr-defined]
    record = tmp_path / "record.json"
    options = ["--values", "4096", "--shrink", "64", "--steps", "2", "--record", str(record)]
    assert trained.main([*options, "--month", "2026-11"]) == 0
    table = from_json(record.read_text(), "record")
    assert [row[2] for row in table.rows if row[0] == "optimizer"] == ["adamw_kahan_bf16", "adamw_split_bf16"]
    products = [row for row in table.rows if row[0] == "products"]
    assert len(products) == 3 * 5
    assert products[0][1] == "gate and up of Llama-8B, 448 x 64, 64 tokens"
    quantising = [row for row in table.rows if row[0] == "quantising"]
    assert len(quantising) == 3 * 8 and all(float(row[7]) >= 0 for row in quantising)
    assert all(float(row[3]) > 0 for row in table.rows)
    assert len(capsys.readouterr().out.splitlines()) == len(table.rows) == 41


def test_the_optimizer_that_ours_is_compared_with_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HardwareError, match="torch-optimi") as caught:
        trained.main(["--parts", "products,optimizer", "--values", "4096", "--shrink", "64"])
    assert "pip install -c constraints.txt -e '.[dev]'" in str(caught.value)
