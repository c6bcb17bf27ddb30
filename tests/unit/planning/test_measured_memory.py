"""Plans beside what was measured on an H200: docs/benchmarks/*memory.json, and notes.md's sweep there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench import memory, sweep
from tests.unit.planning.conftest import GIB, MACHINES
from trainer import families
from trainer.planning.shapes import run_shapes
from trainer.planning.shapes.run_shapes import CONFIGS

REPOSITORY = Path(__file__).resolve().parents[3]
RECORD = REPOSITORY / "docs" / "benchmarks" / "2026-11-h200-memory.json"
# all are imported before one is changed: a family may take another's values as it is imported
FAMILIES = {name: families.get(name) for name in families.names()}
ROWS = [tuple(row) for row in json.loads(RECORD.read_text())["rows"]]

# what the sweep's machine measured of kernels that h200.json has other figures of, or none
PROBED = {
    "attention.flash_attn_4": 1.42,
    "matmul.bf16": 0.66,
    "matmul.fp8": 0.40,
    "matmul.int8": 0.70,
    "matmul.nf4": 0.73,
}
# settings of FLUX.1-dev: GiB with the driver's, and milliseconds
SWEPT = {
    "fp8, everything kept": (43.4, 232.8),
    "fp8, 0.6 kept": (39.2, 251.8),
    "fp8, one copy, 0.2 kept": (21.8, 285.8),
    "fp8, one copy, 42 of 57 blocks recomputed": (22.0, 288.5),
    "fp8, one copy, all blocks recomputed": (17.7, 303.7),
    "bf16, everything kept": (43.1, 310.1),
    "bf16, 0.6 kept": (36.7, 335.1),
    "int8, everything kept": (33.0, 330.7),
    "int8, 0.6 kept": (14.8, 417.9),
    "int8, 0.4 kept": (14.8, 419.8),
    "int8, all blocks recomputed": (14.8, 421.7),
    "nf4, everything kept": (27.5, 342.7),
    "nf4, 0.6 kept": (9.5, 436.3),
}


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
    kept = dataclasses.replace(FAMILIES[family], modulation=())
    monkeypatch.setattr(f"trainer.families.{family}.{family.upper()}", kept)
    counts = tuple(int(count) for count in blocks.split(","))
    # nothing had been probed: torch's own kernel
    overrides = (*memory.SETTINGS[setting], "features.attention=flash")
    case = memory.Case(family, CONFIGS / family, setting, overrides, counts)
    _, plan = memory.planned(case, tmp_path)
    planned = sum(row.bytes for row in plan.train_memory) / GIB
    assert planned == pytest.approx(float(held) + float(driver), rel=0.05)


def test_many_settings_of_four_families_were_measured() -> None:
    assert len(ROWS) >= 24 and len({row[0] for row in ROWS}) == 4


@pytest.mark.parametrize(("setting", "held", "milliseconds"), [(name, *row) for name, row in SWEPT.items()])
def test_a_plan_is_near_what_the_sweep_measured(
    setting: str, held: float, milliseconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory within 5 %, the time within 7 %."""
    _probed_h200(tmp_path, monkeypatch)
    overrides = ("train.max_train_steps=2000", *sweep.all_settings(57)[setting])
    one_copy = setting.startswith("fp8, one copy")
    case = memory.Case("flux1_dev", CONFIGS / "flux1_dev", setting, overrides, one_copy=one_copy)
    _, plan = memory.planned(case, tmp_path)
    assert plan.attention == "flash_attn_4"
    assert plan.weight_copies == (2 if setting.startswith("fp8") and not one_copy else 1)
    planned = sum(row.bytes for row in plan.train_memory) / GIB
    assert planned == pytest.approx(held, rel=0.05)
    assert plan.step_milliseconds == pytest.approx(milliseconds, rel=0.07)


@pytest.mark.parametrize(
    ("family", "budget", "held", "milliseconds"),
    # Qwen-Image's fastest step: its budget has no room for CUDA graphs, and others wait for the host; its
    # captions had 512 tokens
    [("flux1_dev", "16GiB", 14.8, 315.6), ("qwen_image", "24GiB", 23.2, 383.8)],
)
def test_fp8_beside_modulation_in_int8_is_planned_as_measured(
    family: str,
    budget: str,
    held: float,
    milliseconds: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _probed_h200(tmp_path, monkeypatch)
    monkeypatch.setattr(run_shapes, "_CAPTION_TOKENS", 512)
    overrides = ("train.max_train_steps=2000", f"features.memory_budget={budget}")
    _, plan = memory.planned(memory.Case(family, CONFIGS / family, budget, overrides), tmp_path)
    assert (plan.weights, plan.compute, plan.weight_copies, plan.modulation) == ("fp8", "fp8", 1, "int8")
    assert sum(row.bytes for row in plan.train_memory) / GIB == pytest.approx(held, rel=0.05)
    assert plan.step_milliseconds == pytest.approx(milliseconds, rel=0.07)


@pytest.mark.parametrize(
    ("targets", "held"),
    [("attention", 117.5), ("[to_q, to_k, to_v, to_out.0, to_qkv_mlp_proj]", 107.0)],
)
def test_inputs_that_targets_leave_out_are_not_planned(
    targets: str, held: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLUX.2-dev in bf16, nothing recomputed: the output layers of its single blocks are the preset's too."""
    _probed_h200(tmp_path, monkeypatch)
    overrides = (*memory.SETTINGS["compiled"], f"lora.target_modules={targets}", "features.attention=cudnn")
    case = memory.Case("flux2_dev", CONFIGS / "flux2_dev", targets, overrides)
    _, plan = memory.planned(case, tmp_path)
    assert sum(row.bytes for row in plan.train_memory) / GIB == pytest.approx(held, rel=0.03)


def _probed_h200(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that was measured, with what was probed on it."""
    facts = json.loads((MACHINES / "h200.json").read_text())
    rows = {row["kernel"]: row for row in facts["verdicts"]}
    for name, one in PROBED.items():
        like = rows.get(name, rows["attention.cudnn" if name.startswith("attention") else "matmul.bf16"])
        rows[name] = {**like, "kernel": name, "milliseconds": one}
    packages = {**facts["packages"], "flash-attn-4": "4.0"}
    (folder / "facts.json").write_text(
        json.dumps({**facts, "verdicts": list(rows.values()), "packages": packages})
    )
    monkeypatch.setenv("TRAINER_FACTS", str(folder / "facts.json"))
    monkeypatch.setenv("TRAINER_PROFILE", "auto")
