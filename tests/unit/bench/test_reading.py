"""bench reading: a tiny base's files, written and loaded by one process and by two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench import processes, reading
from bench.processes import Ended
from bench.record import from_json
from trainer.errors import HardwareError


def test_files_have_all_tensors_of_the_model_with_finite_values(tiny_flux1_dev: Path, tmp_path: Path) -> None:
    reading.write_base("flux1_dev", tiny_flux1_dev, tmp_path / "base")
    files = sorted((tmp_path / "base" / "transformer").glob("*.safetensors"))
    theirs = sorted((tiny_flux1_dev / "transformer").glob("*.safetensors"))
    shapes: list[dict[str, Any]] = [{}, {}]
    for found, paths in zip(shapes, (files, theirs), strict=True):
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    tensor = file.get_tensor(name)
                    found[name] = tuple(tensor.shape)
                    assert torch.isfinite(tensor.float()).all()
    assert shapes[0] == shapes[1]


def test_a_tensor_larger_than_the_pool_is_filled() -> None:
    pool = torch.arange(7, dtype=torch.bfloat16)
    assert reading._values(pool, "a", torch.empty(3, 5, dtype=torch.float32)).flatten().tolist() == [
        *range(7), *range(7), 0.0,
    ]  # fmt: skip
    assert reading._values(pool, "a", torch.empty(2, 2)).shape == (2, 2)


def test_a_base_that_was_not_read_from_the_files_is_an_error(tmp_path: Path) -> None:
    """Random weights were measured as if they had come from files once."""
    module = torch.nn.Linear(4, 3)
    with pytest.raises(HardwareError, match="could be compared"):
        reading.require_read(module, tmp_path)
    save_file(
        {"weight": module.weight.detach(), "bias": module.bias.detach().clone()}, tmp_path / "a.safetensors"
    )
    reading.require_read(module, tmp_path)
    with torch.no_grad():
        module.bias += 1
    with pytest.raises(HardwareError, match="bias is not what"):
        reading.require_read(module, tmp_path)


@pytest.mark.slow
def test_one_process_beside_two_that_share_the_reading(
    tiny_flux1_dev: Path,
    tmp_path: Path,
    run_forked: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    monkeypatch.setattr(processes, "run", run_forked)
    monkeypatch.setattr(reading, "_POOL_VALUES", 2**18)
    record = tmp_path / "record.json"
    given = ["flux1_dev", "--base", str(tiny_flux1_dev), "--folder", str(tmp_path), "--rounds", "1"]
    assert reading.main([*given, "--record", str(record), "--month", "2026-11"]) == 0
    table: Any = from_json(record.read_text(), "record")
    rows = {row[1]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert {way: row["GPUs"] for way, row in rows.items()} == {"one": "1", "replicated": "2", "sharded": "2"}
    assert rows["one"]["of one"] == "1.00"
    assert [len(row["GiB read by each"].split(", ")) for row in rows.values()] == [1, 2, 2]
    assert not (tmp_path / "reading-flux1_dev").exists()
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 3
