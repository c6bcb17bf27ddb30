"""Plans of full fine-tunes beside measured figures: what is run, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import full, memory, processes
from bench.record import from_json
from tests.golden.plans import MACHINES
from tests.unit.bench.test_bench import MACHINE
from trainer.planning.shapes.run_shapes import CONFIGS
from trainer.telemetry.measurement import Table

ROW = {
    "family": "llama",
    "setting": "fp8",
    "planned_gib": 96.0,
    "held_gib": 99.0,
    "driver_gib": 1.0,
    "planned_milliseconds": 330.0,
    "milliseconds": 300.0,
}


def test_memory_and_time_are_compared_with_what_was_measured() -> None:
    row = full.compared_row(ROW, 4)
    assert tuple(row) == full.COLUMNS
    assert (row["planned GiB"], row["measured GiB"], row["planned of measured"]) == (96.0, 100.0, 0.96)
    assert (row["predicted ms"], row["measured ms"], row["predicted of measured"]) == (330, 300, 1.1)
    assert full.is_near(row)
    for planned, predicted in ((94.0, 330.0), (106.0, 330.0), (96.0, 331.0), (96.0, 269.0)):
        far = ROW | {"planned_gib": planned, "planned_milliseconds": predicted}
        assert not full.is_near(full.compared_row(far, 4))


@pytest.mark.parametrize("word", ["refused", "failed"])
def test_a_setting_without_figures_is_a_problem(word: str) -> None:
    row = full.compared_row({"family": "llama", "setting": "fp8", word: "no room"}, 1)
    assert row["problem"] == "no room" and not full.is_near(row)


def test_three_families_have_twelve_settings_and_leave_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases: list[memory.Case] = []

    def measured(case: memory.Case, environ: Mapping[str, str]) -> dict[str, Any]:
        cases.append(case)
        return ROW | {"family": case.family, "setting": case.setting}

    monkeypatch.setattr(full.idle, "require_gpu", lambda remedy: None)
    monkeypatch.setattr(full.description, "describe", lambda month: MACHINE)
    monkeypatch.setattr(full.sweep, "probe", lambda case: None)
    monkeypatch.setattr(processes, "visible", lambda: ["0"])
    monkeypatch.setattr(memory, "measured_row", measured)
    record = tmp_path / "record.json"
    names = ("llama", "flux1_dev", "kandinsky5")
    given = [f"{name}={CONFIGS / name}" for name in names]
    assert full.main([*given, "--record", str(record), "--micro-batches", "2"]) == 0
    assert [(case.family, case.setting) for case in cases] == [
        (name, setting) for name in names for setting in full.SETTINGS
    ]
    assert all(case.micro_batches == 2 for case in cases)
    assert len(capsys.readouterr().out.splitlines()) == 12
    table = from_json(record.read_text(), str(record))
    assert isinstance(table, Table) and len(table.rows) == 12 and table.columns == full.COLUMNS
    assert table.rows[2][:3] == ("llama", "fp8", "2")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_FACTS", str(MACHINES / "h200.json"))
    monkeypatch.setenv("TRAINER_PROFILE", "auto")


@pytest.mark.parametrize("family", ["llama", "flux1_dev", "kandinsky5"])
@pytest.mark.parametrize("setting", full.SETTINGS)
def test_every_setting_has_a_plan_on_the_recorded_h200(
    family: str, setting: str, tmp_path: Path, h200: None
) -> None:
    overrides = (*full.SETTINGS[setting], "train.gradient_accumulation_steps=1")
    loaded, plan = memory.planned(memory.Case(family, CONFIGS / family, setting, overrides), tmp_path)
    assert loaded.config.method == "full"
    assert (plan.compute, plan.activation_checkpointing, plan.accumulation_steps) == (
        setting.partition(",")[0],
        "recomputed" in setting,
        1,
    )
    assert plan.compile and plan.step_milliseconds > plan.optimizer_milliseconds > 0


def test_a_step_of_several_micro_batches_adds_their_gradients(
    tiny_base: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU: the optimizer steps once, by the mean loss of all of them."""
    from bench import jobs, steps
    from trainer.engine.building.build import build

    monkeypatch.setenv("TRAINER_FACTS", str(MACHINES / "cpu.json"))
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    overrides = ("method=full", "data.resolution=64", "data.max_sequence_length=16")
    case = memory.Case("flux1_dev", tiny_base("flux1_dev"), "bf16", overrides)
    loaded, plan = memory.planned(case, tmp_path)
    built = build(context := jobs.make_context(str(jobs.write_job(loaded, plan, tmp_path))))
    taken: list[float] = []
    step = built.updater.step

    def watched(rate: float, loss: Any) -> Any:
        taken.append(float(loss))
        return step(rate, loss)

    monkeypatch.setattr(built.updater, "step", watched)
    for count in (1, 3):
        steps.make_step(context, built, 16, count)()
    assert len(taken) == built.updater.steps_taken == 2
    assert taken[1] == pytest.approx(taken[0], rel=0.05)
