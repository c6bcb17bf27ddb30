"""How many processes share a run's steps, and what the plan says of it."""

from __future__ import annotations

import functools

import pytest

from tests.unit.planning.conftest import GIB, machine
from tests.unit.planning.test_resolve import Config, plan, row
from trainer.config.schema import RunConfig
from trainer.errors import ConfigError, HardwareError
from trainer.machine.facts import Facts
from trainer.planning.plan import Plan
from trainer.planning.shapes.geometry import Geometry


def planned(config: RunConfig, geometry: Geometry, facts: Facts | None = None) -> Plan:
    return plan(config, facts or machine("cpu"), geometry, geometry_of=lambda changed, dtype: geometry)


@pytest.fixture
def shared(config: Config) -> Config:
    return functools.partial(config, train__gradient_accumulation_steps=4)


@pytest.mark.parametrize("gpus", [1, "auto"])
def test_one_process_has_no_row(shared: Config, geometry: Geometry, gpus: int | str) -> None:
    found = planned(shared(parallel__gpus=gpus), geometry)
    assert found.ranks == 1
    assert all(one.feature != "gpus" for one in found.decisions)


def test_processes_share_a_step_and_the_machine(shared: Config, geometry: Geometry) -> None:
    one, two = planned(shared(), geometry), planned(shared(parallel__gpus=2), geometry)
    assert (two.ranks, two.micro_batch_size, two.accumulation_steps) == (2, 1, 4)
    assert row(two, "gpus").reason.startswith("each takes 2 of a step's 4 micro-batches")
    assert two.budget_bytes == one.budget_bytes // 2
    assert two.keep_bytes <= one.keep_bytes // 2
    assert two.keep_bytes > GIB // 10


def test_a_batch_is_parted_where_processes_could_not_share_it_and_the_plan_says_so(
    config: Config, geometry: Geometry
) -> None:
    found = planned(config(train__train_batch_size=4, parallel__gpus=2), geometry)
    assert (found.micro_batch_size, found.accumulation_steps) == (2, 2)
    told = row(found, "micro_batch")
    assert told.value == "2 x 2"
    assert told.reason == "4 samples at once cannot be shared by 2 processes; a step still has 4"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train__gradient_accumulation_steps": 4, "parallel__gpus": 3}, "3 do not share the 4 samples"),
        ({"parallel__gpus": 2, "method": "full"}, "a full fine-tune trains in one process"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    config: Config, geometry: Geometry, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(config(**changes), geometry)


def test_several_gpus_are_refused_by_this_version(shared: Config, geometry: Geometry) -> None:
    with pytest.raises(HardwareError, match="trains on one GPU"):
        planned(shared(parallel__gpus=2), geometry, machine("h200"))
