"""The plan as text, JSON and shell exports."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable

import pytest

from tests.unit.planning.conftest import machine
from tests.unit.planning.test_resolve import plan as plan_of
from trainer.config.schema import RunConfig
from trainer.errors import HardwareError
from trainer.files import codec
from trainer.machine.profiles import PROFILES
from trainer.planning.plan import Plan
from trainer.planning.render import environment_exports, plan_text
from trainer.planning.shapes.geometry import Geometry


@pytest.fixture
def plan(config: Callable[..., RunConfig], geometry: Geometry) -> Plan:
    return plan_of(config(), machine("dgx-spark"), geometry)


def test_every_decision_and_memory_row_is_printed(plan: Plan) -> None:
    text = plan_text(plan)
    for decision in plan.decisions:
        assert f"\n{decision.feature} " in text
        assert decision.reason.split()[0] in text
    for row in (*plan.train_memory, *plan.cache_memory):
        assert row.name in text
    assert max(len(line) for line in text.splitlines()) <= 118


def test_the_sum_is_compared_with_the_budget(plan: Plan) -> None:
    total = sum(row.bytes for row in plan.train_memory) / 1024**3
    assert f"{total:.2f} GiB" in plan_text(plan)
    assert f"{plan.budget_bytes / 1024**3:.2f} GiB" in plan_text(plan)


def test_json_round_trip(plan: Plan) -> None:
    assert codec.from_json(Plan, codec.to_json(plan), "plan.json") == plan
    assert codec.to_json(codec.from_json(Plan, codec.to_json(plan), "plan.json")) == codec.to_json(plan)


def test_a_foreign_key_in_plan_json_is_refused(plan: Plan) -> None:
    tree = json.loads(codec.to_json(plan)) | {"atention": "flash"}
    with pytest.raises(HardwareError, match=r"runs/x/plan\.json: atention"):
        codec.from_json(Plan, json.dumps(tree), "runs/x/plan.json")


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        pytest.param({}, "PASSIVE", id="not-set"),
        pytest.param({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", id="the-user's"),
    ],
)
def test_sleeping_threads_on_a_cpu_unless_the_user_says_otherwise(
    plan: Plan, own: dict[str, str], kept: str
) -> None:
    plan = dataclasses.replace(plan, environment=PROFILES["cpu"].environment)
    assert plan.child_environment({"HOME": "/", **own}) == {"HOME": "/", "OMP_WAIT_POLICY": kept}
    script = environment_exports(plan) + 'printf %s "$OMP_WAIT_POLICY"'
    shown = subprocess.run(["sh", "-euc", script], env=own, capture_output=True, text=True, check=True)
    assert shown.stdout == kept


def test_exports_are_never_executed(plan: Plan) -> None:
    nasty = dataclasses.replace(plan, environment={"VALUE": "a'b; touch /tmp/x $(echo no) `echo no`"})
    script = environment_exports(nasty) + 'printf %s "$VALUE"'
    shown = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, check=True)
    assert shown.stdout == nasty.environment["VALUE"]


def test_exports_of_the_spark(plan: Plan) -> None:
    assert environment_exports(plan) == (
        "export CUDA_DEVICE_ORDER=PCI_BUS_ID\nexport PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.75\n"
    )
