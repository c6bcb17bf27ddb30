"""Every family and method can be planned on every recorded machine, or is refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.runs import CASES, Case, Workshop
from tests.golden import plans
from trainer import families
from trainer.config.reading.load import load
from trainer.errors import ExitCode, HardwareError
from trainer.files import codec
from trainer.machine.reading import read_recorded
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run
from trainer.planning.render import plan_text

REFUSED = frozenset({"cpu-torch-on-gpu", "driver-550-cuda-13-torch", "too-old-gpu"})
"""Machines whose GPU this torch cannot use: training on their CPU unasked would be no help."""


@pytest.mark.parametrize("machine", plans.machines())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plan(case: Case, machine: str, workshop: Workshop, tmp_path: Path) -> None:
    defaults = {name: families.get(name).defaults for name in families.names()}
    loaded = load([workshop.write_config(case, tmp_path)], family_defaults=defaults, environ={})
    facts = read_recorded(plans.MACHINES / f"{machine}.json")
    if machine in REFUSED:
        with pytest.raises(HardwareError) as caught:
            plan_run(loaded, facts)
        assert caught.value.exit_code is ExitCode.HARDWARE
        assert all(problem.what and problem.remedy for problem in caught.value.problems)
        return
    plan = plan_run(loaded, facts)
    assert plan.train_memory
    assert plan.peak_bytes > 0
    assert plan.disk_bytes > 0
    assert all(row.value and row.source and row.reason for row in plan.decisions)
    assert codec.from_json(Plan, codec.to_json(plan), "plan.json") == plan
    assert machine.startswith(("cpu", "no-gpu")) == (plan.device == "cpu")
    assert plan_text(plan)


@pytest.mark.parametrize("family", families.names())
def test_full_fine_tunes_in_four_ways(family: str, tmp_path: Path) -> None:
    """On an H200 with the memory for each: FP8 is faster, recomputing is slower and takes less."""
    facts = read_recorded(plans.MACHINES / "h200.json")
    facts = replace(facts, gpus=(replace(facts.gpus[0], total_memory_bytes=2**40),))
    found = {}
    for products in ("bf16", "fp8"):
        for recomputed in (False, True):
            layer = {
                "features": {"compute": products, "compile": True, "activation_checkpointing": recomputed},
                "train": {"gradient_accumulation_steps": 2},
            }
            (tmp_path / "layer.yaml").write_text(json.dumps(layer))
            files = [plans.ROOT / "train_configs" / f"{family}_full.yaml", tmp_path / "layer.yaml"]
            defaults = {name: families.get(name).defaults for name in families.names()}
            loaded = load(files, family_defaults=defaults, environ={})
            found[products, recomputed] = plan_run(loaded, facts, find_model=lambda _: None)
    for plan in found.values():
        sizes = {row.name: row.bytes for row in plan.train_memory}
        assert all(size >= 0 for size in sizes.values()) and len(sizes) == len(plan.train_memory)
        assert sum(sizes.values()) == plan.peak_bytes
        assert {"trained weights", "gradients", "optimizer state", "activations"} <= sizes.keys()
        assert ("fp8 weights" in sizes) == (plan.compute == "fp8")
        # a micro-batch has half of the optimizer's step
        assert 0 < plan.optimizer_milliseconds / 2 < plan.step_milliseconds
        assert "optimizer_time" in {row.feature for row in plan.decisions}
    for recomputed in (False, True):
        bf16, fp8 = found["bf16", recomputed], found["fp8", recomputed]
        assert fp8.step_milliseconds < bf16.step_milliseconds
        assert fp8.optimizer_milliseconds > bf16.optimizer_milliseconds
        assert fp8.peak_bytes > bf16.peak_bytes
    for products in ("bf16", "fp8"):
        kept, again = found[products, False], found[products, True]
        assert again.step_milliseconds > kept.step_milliseconds
        assert again.peak_bytes < kept.peak_bytes


def test_an_adapter_has_no_step_of_its_own(workshop: Workshop, tmp_path: Path) -> None:
    facts = read_recorded(plans.MACHINES / "h200.json")
    defaults = {name: families.get(name).defaults for name in families.names()}
    loaded = load([workshop.write_config(CASES[0], tmp_path)], family_defaults=defaults, environ={})
    plan = plan_run(loaded, facts)
    assert (loaded.config.method, plan.optimizer_milliseconds) == ("lora", 0.0)
    assert "optimizer_time" not in {row.feature for row in plan.decisions}
