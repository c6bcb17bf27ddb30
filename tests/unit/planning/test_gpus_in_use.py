"""GPUs that other programs work on: left out by `auto`, taken last where a number is written, told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.golden.plans import MACHINES, ROOT, load_shipped
from tests.unit.planning.conftest import GIB, machine
from trainer.cli import jobs
from trainer.config.reading.load import with_settings
from trainer.errors import HardwareError
from trainer.machine.facts import Facts
from trainer.machine.reading import read_recorded
from trainer.planning import planning
from trainer.planning.planning import plan_run, short_of_memory

IDLE_BYTES = GIB // 2


def server(used: Mapping[int, float], name: str = "several/h200-x8") -> Facts:
    """A machine with several GPUs, of which some have so many GiB in use."""
    facts = read_recorded(MACHINES / f"{name}.json")
    gpus = (
        dataclasses.replace(
            gpu, free_memory_bytes=gpu.total_memory_bytes - int(used.get(place, 0) * GIB) - IDLE_BYTES
        )
        for place, gpu in enumerate(facts.gpus)
    )
    return dataclasses.replace(facts, gpus=tuple(gpus))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def planned(facts: Facts, **values: object) -> planning.Plan:
    """The plan of FLUX.1-dev's LoRA, with four micro-batches a step."""
    loaded = load_shipped(Path("train_configs/flux1_dev_lora.yaml"))
    changed = with_settings(loaded, {key.replace("__", "."): value for key, value in values.items()})
    return plan_run(changed, facts, find_model=lambda _: None)


def gpus_row(plan: planning.Plan) -> str:
    return next(row.reason for row in plan.decisions if row.feature == "gpus")


def test_auto_leaves_out_what_others_use() -> None:
    plan = planned(server({0: 60.0, 2: 20.0}))
    assert (plan.ranks, plan.devices) == (4, (1, 3, 4, 5))
    told = gpus_row(plan)
    assert "on GPU 1 and 3 and 4 and 5" in told
    assert (
        "left out, in use by other programs: GPU 0 (60.5 of 139.8 GiB) and GPU 2 (20.5 of 139.8 GiB)" in told
    )
    assert "of another kind" not in told
    assert not plan.warnings


def test_fewer_free_ones_share_the_step() -> None:
    plan = planned(server(dict.fromkeys(range(5), 30.0)))
    assert (plan.ranks, plan.devices) == (2, (5, 6))


def test_one_free_gpu_of_several_is_the_one_that_trains() -> None:
    plan = planned(server({0: 60.0}, "several/h200-x2"))
    assert (plan.ranks, plan.devices) == (1, (1,))
    assert "GPU 0 (60.5" in gpus_row(plan)


def test_a_little_memory_is_a_display_or_the_driver() -> None:
    plan = planned(server({0: 1.5}, "several/rtx-4090-x2"))
    assert plan.devices == (0, 1)


def test_where_all_are_in_use_all_may_be_taken() -> None:
    used, free = server({0: 60.0, 1: 60.0}, "several/h200-x2"), server({}, "several/h200-x2")
    assert planned(used).devices == planned(free).devices == (0, 1)


def test_a_written_number_takes_the_free_ones_first() -> None:
    facts = server({0: 60.0, 1: 60.0, 2: 60.0})
    assert planned(facts, parallel__gpus=1).devices == (3,)
    assert planned(facts, parallel__gpus=2).devices == (3, 4)
    assert planned(server({0: 60.0}, "several/h200-x2"), parallel__gpus=2).devices == (1, 0)


def test_a_kind_that_is_in_use_gives_way_to_one_that_is_free() -> None:
    facts = read_recorded(MACHINES / "several" / "rtx-3060-and-4090.json")
    (place,) = facts.kinds[0]
    plan = planned(server({place: 12.0}, "several/rtx-3060-and-4090"))
    assert plan.devices == tuple(one for one in range(len(facts.gpus)) if one != place)
    assert f"in use by other programs: GPU {place}" in gpus_row(plan)


def test_of_several_in_use_those_with_the_memory_train() -> None:
    used = {0: 120.0, 1: 20.0}
    plan = planned(server(used, "several/h200-x2"))
    assert (plan.devices, plan.warnings) == ((1,), ())
    assert "left out, in use by other programs: GPU 0 (120.5" in gpus_row(plan)
    assert planned(server(used, "several/h200-x2"), parallel__gpus=1).devices == (1,)


def test_where_none_has_the_memory_it_is_told_of_those_that_would_train() -> None:
    plan = planned(server({0: 120.0, 1: 120.0}, "several/h200-x2"))
    assert plan.devices == (0, 1)
    assert len(plan.warnings) == 2


def test_a_larger_gpu_with_a_display_is_still_the_larger_one() -> None:
    """A desktop takes more than a tenth of 24 GiB, and leaves more than a smaller GPU has."""
    facts = read_recorded(MACHINES / "several" / "rtx-3060-and-4090.json")
    (place,) = facts.kinds[0]
    plan = planned(server({place: 2.5}, "several/rtx-3060-and-4090"))
    assert plan.devices == (place,)
    assert "with the most memory" in gpus_row(plan)


def test_a_run_that_only_fits_a_gpu_in_use_is_planned_for_that() -> None:
    facts = read_recorded(MACHINES / "several" / "rtx-3060-and-4090.json")
    (place,) = facts.kinds[0]
    used = server({place: 12.0}, "several/rtx-3060-and-4090")
    plan = planned(used, features__memory_budget="16GiB")
    assert plan.devices == (place,)
    assert len(plan.warnings) == 1 and "another program uses it" in plan.warnings[0]


def test_the_smaller_gpu_is_not_said_to_have_the_most_memory() -> None:
    facts = read_recorded(MACHINES / "several" / "rtx-3060-and-4090.json")
    (place,) = facts.kinds[0]
    plan = planned(server({place: 12.0}, "several/rtx-3060-and-4090"))
    assert "with the most memory" not in gpus_row(plan)


def test_what_others_use_is_not_recorded() -> None:
    facts = server({0: 60.0})
    assert facts.idle() == server({}).idle() == read_recorded(MACHINES / "several" / "h200-x8.json")


def test_a_plan_for_more_than_is_free_is_told() -> None:
    facts = server({0: 120.0}, "several/h200-x2")
    plan = planned(dataclasses.replace(facts, gpus=facts.gpus[:1]))
    (told,) = plan.warnings
    assert told.startswith("GPU 0 has 19.3 GiB of its 139.8 GiB free, and the run needs ")
    assert short_of_memory(plan, dataclasses.replace(facts, wsl=True)) == ()
    assert short_of_memory(plan, dataclasses.replace(facts, gpus=machine("h200").gpus)) == ()  # not known


class Clock:
    """Time that passes as somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_training_waits_for_memory_that_is_given_back_and_then_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used, free = server({0: 120.0}, "several/h200-x2"), server({}, "several/h200-x2")
    plan, clock = planned(free), Clock()
    monkeypatch.setattr(jobs, "time", clock)
    monkeypatch.setattr(planning, "machine_facts", lambda: free if clock.now > 3 else used)
    jobs.require_free_memory(plan, used)
    assert 3 < clock.now < 4
    assert capsys.readouterr().err.count("another program uses it; waiting 20 s for it") == 1
    monkeypatch.setattr(planning, "machine_facts", lambda: used)
    with pytest.raises(HardwareError, match=r"GPU 0 has 19\.3 GiB of its 139\.8 GiB free") as refused:
        jobs.require_free_memory(plan, used)
    assert "CUDA_VISIBLE_DEVICES" in str(refused.value)
    assert 23 < clock.now < 24
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(HardwareError, match="where GPU 0 is the first of CUDA_VISIBLE_DEVICES=2,3"):
        jobs.require_free_memory(plan, used)
    gone = dataclasses.replace(used, gpus=used.gpus[:1])
    monkeypatch.setattr(planning, "machine_facts", lambda: gone)
    with pytest.raises(HardwareError, match="GPU 1 of the plan is gone: 1 are visible now"):
        jobs.require_free_memory(plan, used)
