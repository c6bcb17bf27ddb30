"""auto's choice beside the best that fits, and runs dealt out to GPUs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import count, processes, sweep
from bench.ours import watch
from tests.unit.modeling.small_models import FAMILIES, case


def row(setting: str, milliseconds: float, held: float) -> dict[str, Any]:
    return {"setting": setting, "milliseconds": milliseconds, "held_gib": held, "driver_gib": 0.5}


def test_the_best_is_the_fastest_that_fits() -> None:
    rows = [
        row("auto, 24 GiB", 330.0, 23.0),
        row("fp8", 240.0, 23.6),  # with the driver's share it does not fit
        row("int8", 300.0, 23.4),
        {"setting": "nf4", "failed": "no"},
    ]
    found = sweep.judge(rows, 24.0)
    assert (found["best"], found["best_setting"], found["auto"]) == (300.0, "int8", 330.0)
    assert found["ratio"] == pytest.approx(1.1)
    assert found["settings"] == 3


@pytest.mark.parametrize("rows", [[row("int8", 300.0, 5.0)], [row("auto, 24 GiB", 300.0, 30.0)]])
def test_no_verdict_without_figures(rows: list[dict[str, Any]]) -> None:
    assert sweep.judge(rows, 24.0) == {"budget_gib": 24.0}


def test_each_run_is_alone_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 3")
    assert processes.visible() == ["0", "3"]
    busy: list[str] = []

    def work(number: int, environ: Mapping[str, str]) -> tuple[int, str]:
        gpu = environ["CUDA_VISIBLE_DEVICES"]
        assert gpu not in busy
        busy.append(gpu)
        busy.remove(gpu)
        return number, gpu

    found = processes.side_by_side(work, range(6), jobs=2)
    assert [number for number, _ in found] == list(range(6))
    assert {gpu for _, gpu in found} <= {"0", "3"}


def test_jobs_share_gpus_evenly() -> None:
    def work(_: int, environ: Mapping[str, str]) -> str:
        return environ["CUDA_VISIBLE_DEVICES"]

    seen = processes.side_by_side(work, range(4), jobs=4, gpus=["0", "1"])
    assert set(seen) <= {"0", "1"}


def test_lists_of_blocks_are_found_in_order() -> None:
    made = case("flux1_dev")
    found = list(count.block_lists(made.model, FAMILIES["flux1_dev"].blocks))
    assert [type(one.blocks[0]).__name__ for one in found] == [
        "FluxTransformerBlock",
        "FluxSingleTransformerBlock",
    ]
    assert all(getattr(one.parent, one.name) is one.blocks for one in found)


def test_settings_divide_the_blocks() -> None:
    found = sweep.all_settings(57)
    recomputed = [name for name in found if name.startswith("int8") and "57 blocks" in name]
    assert [name.split()[1] for name in recomputed] == ["14", "28", "42"]
    assert "features.activation_checkpointing=28" in found["int8, 28 of 57 blocks recomputed"]
    assert len(found) == 5 * 8 + 2


def test_a_watch_sees_the_first_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with watch(log) as seen:
        time.sleep(0.3)
        log.write_text("")
        time.sleep(0.5)
        assert seen["first_step_seconds"] is None
        log.write_text("one")
        deadline = time.monotonic() + 20
        while seen["first_step_seconds"] is None and time.monotonic() < deadline:
            time.sleep(0.05)
    assert seen["first_step_seconds"] is not None and seen["first_step_seconds"] > 0.7
    assert seen["device_gib"] is None


def test_auto_that_holds_more_than_its_budget_is_no_win() -> None:
    found = sweep.judge([row("auto, 24 GiB", 200.0, 30.0), row("int8", 300.0, 20.0)], 24.0)
    assert found == {"budget_gib": 24.0, "auto_peak_gib": 30.5}


def test_a_machine_without_nvidia_smi_hides_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def work(_: int, environ: Mapping[str, str]) -> bool:
        return "CUDA_VISIBLE_DEVICES" in environ

    assert processes.side_by_side(work, range(2), jobs=1, gpus=[""]) == [False, False]


def test_what_recomputes_less_is_no_slower() -> None:
    chain = [f"fp8, {way}" for way in ("everything kept", "0.6 kept", "0.4 kept")]
    blocks = [f"fp8, {way}" for way in ("14 of 57 blocks recomputed", "42 of 57 blocks recomputed")]
    every = "fp8, all blocks recomputed"
    assert sweep.recomputes_less(chain[0], chain[1]) and sweep.recomputes_less(chain[1], chain[2])
    assert sweep.recomputes_less(chain[0], blocks[0]) and sweep.recomputes_less(blocks[0], blocks[1])
    assert sweep.recomputes_less(blocks[1], every)
    others = [
        (chain[1], blocks[0]),
        (blocks[1], blocks[0]),
        (chain[2], every),
        (every, chain[0]),
        (every, every),
    ]
    assert not any(sweep.recomputes_less(other, setting) for other, setting in others)
    assert not sweep.recomputes_less("fp8, one copy, everything kept", "fp8, all blocks recomputed")
    assert not sweep.recomputes_less("bf16, eager", "bf16, all blocks recomputed")


def test_only_what_cannot_be_the_best_is_left_out() -> None:
    known = [
        row("fp8, everything kept", 240.0, 43.0),
        row("fp8, one copy, all blocks recomputed", 340.0, 15.0),
    ]
    budgets = (16.0, 24.0, 48.0)
    assert sweep.needless("bf16, everything kept", 60.0, known, budgets) == "needs 60.0 GiB by prediction"
    # nothing that fits 24 GiB is faster by what is known
    assert not sweep.needless("int8, 0.6 kept", 24.9, known, budgets)
    slow = [*known, row("int8, everything kept", 400.0, 40.0)]
    assert "400.0 ms at least" in sweep.needless("int8, 0.6 kept", 24.9, slow, budgets)
    # a prediction may miss by some per cent
    assert not sweep.needless("nf4, everything kept", 16.9, known, budgets)
    assert sweep.needless("fp8, 0.6 kept", 36.0, known, budgets) == "240.0 ms at least, [240.0] are known"
