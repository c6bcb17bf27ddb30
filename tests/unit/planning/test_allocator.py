"""Variables that the user set and the profile sets too: kept and told, or refused."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.unit.planning.conftest import machine
from trainer.cli.options import Layers
from trainer.errors import ConfigError
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run
from trainer.planning.render import environment_exports

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "OMP_WAIT_POLICY")
NEW, OLD, _, OMP = NAMES
CAP, LOWER = "per_process_memory_fraction:0.75", "per_process_memory_fraction:0.5"
Planned = Callable[[str, Mapping[str, str]], Plan]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """planned(machine, environment): the plan there."""
    (tmp_path / "c.yaml").write_text(
        "family: flux1_dev\ndata: {sets: [{img_dir: images}]}\noutput_dir: out\nmodel: {weights: random}\n"
        "lora: {rank: 4}\n"
    )

    def plan(name: str, environ: Mapping[str, str]) -> Plan:
        for one in NAMES:
            monkeypatch.delenv(one, raising=False)
        for one, value in environ.items():
            monkeypatch.setenv(one, value)
        loaded = Layers([tmp_path / "c.yaml"], ["features.weights=nf4"], None, None).load()
        return plan_run(loaded, machine(name), "cpu" if name == "cpu" else "auto")

    return plan


def row(plan: Plan) -> tuple[str, str, str]:
    (found,) = [one for one in plan.decisions if one.feature == "environment" and one.value in NAMES]
    return found.value, found.source, found.reason


@pytest.mark.parametrize(
    ("name", "environ", "value", "source", "said"),
    [
        ("h200", {}, "expandable_segments:True", "profile hopper-fp8", "set before the training"),
        ("h200", {NEW: "expandable_segments:True"}, "expandable_segments:True", "profile hopper-fp8", "set"),
        ("h200", {NEW: "max_split_size_mb:64"}, "max_split_size_mb:64", NEW, "yours, in place of expandable"),
        ("h200", {OLD: "max_split_size_mb:64"}, "max_split_size_mb:64", OLD, "yours, in place of expandable"),
        ("h200", {OLD: "a:1", NEW: "a:1"}, "a:1", NEW, "yours"),
        ("h200", {NEW: "  "}, "expandable_segments:True", "profile hopper-fp8", "set before the training"),
        ("dgx-spark", {}, CAP, "profile dgx-spark", "set before the training"),
        (
            "dgx-spark",
            {NEW: "per_process_memory_fraction:0.5"},
            "per_process_memory_fraction:0.5",
            NEW,
            "yours",
        ),
        (
            "dgx-spark",
            {OLD: "expandable_segments:True"},
            f"expandable_segments:True,{CAP}",
            OLD,
            "yours, with the cap that this machine needs (profile dgx-spark)",
        ),
    ],
)
def test_what_the_user_set_stays_and_is_told(
    planned: Planned, name: str, environ: dict[str, str], value: str, source: str, said: str
) -> None:
    plan = planned(name, environ)
    assert row(plan)[:2] == (NEW, source)
    assert row(plan)[2].startswith(f"{value}, {said}")
    child = plan.child_environment({"HOME": "/", **environ})
    assert {key: child[key] for key in NAMES if key in child} == {NEW: value}, "one spelling"
    # a shell that was given what `plan --export` prints, and the command plans again
    shown = subprocess.run(
        ["sh", "-c", environment_exports(plan) + "env"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = dict(line.split("=", 1) for line in shown.splitlines() if line.startswith("PYTORCH_"))
    assert exported == {NEW: value}
    assert planned(name, exported).environment == plan.environment


def test_openmps_policy_stays_and_is_told(planned: Planned) -> None:
    assert row(planned("cpu", {}))[1:] == ("profile cpu", "PASSIVE, set before the training process starts")
    plan = planned("cpu", {OMP: "ACTIVE"})
    assert row(plan) == (OMP, OMP, "ACTIVE, yours, in place of PASSIVE")
    assert plan.child_environment({OMP: "ACTIVE"})[OMP] == "ACTIVE"


@pytest.mark.parametrize(
    ("name", "environ", "where", "said"),
    [
        ("h200", {NEW: "a:1", OLD: "a:2"}, f"{NEW} and {OLD}", "spellings of one variable, and differ"),
        ("dgx-spark", {NEW: "per_process_memory_fraction:0.9"}, NEW, "CPU and GPU share one memory here"),
        ("dgx-spark", {OLD: "x:1,per_process_memory_fraction:all"}, OLD, "beyond 0.75 of it the whole"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    planned: Planned, name: str, environ: dict[str, str], where: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(name, environ)
    (problem,) = refused.value.problems
    assert problem.where == where and said in problem.what and problem.remedy


def test_a_smaller_share_that_the_user_set_is_the_budget(planned: Planned) -> None:
    """Beyond it the allocator fails, whatever the plan counted on."""
    whole = planned("h200", {})
    less = planned("h200", {OLD: "expandable_segments:True,per_process_memory_fraction:0.5"})
    total = machine("h200").gpus[0].total_memory_bytes
    assert less.budget_bytes == total // 2 < whole.budget_bytes
    (found,) = [one for one in less.decisions if one.feature == "memory_budget"]
    assert found.source == OLD and "the allocator may take 50%" in found.reason
    assert planned("h200", {NEW: "per_process_memory_fraction:5e-1"}).budget_bytes == total // 2
    assert planned("h200", {NEW: "per_process_memory_fraction:0"}).budget_bytes == whole.budget_bytes
    assert planned("h200", {NEW: "per_process_memory_fraction:0.99"}).budget_bytes == whole.budget_bytes
    assert planned("dgx-spark", {NEW: LOWER}).budget_bytes < planned("dgx-spark", {}).budget_bytes


def test_each_of_two_shares_is_looked_at(planned: Planned) -> None:
    with pytest.raises(ConfigError, match=r":0\.9 is refused"):
        planned("dgx-spark", {NEW: f"{LOWER},per_process_memory_fraction:0.9"})
