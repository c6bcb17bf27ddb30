"""Every family and method can be planned on every recorded machine, or is refused with a reason."""

from __future__ import annotations

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
