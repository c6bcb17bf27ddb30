"""How many processes share a run's steps, and what the plan says of it."""

from __future__ import annotations

import dataclasses
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


def several(*kinds: int) -> Facts:
    """A machine with GPUs of two kinds, by number: 0 for an H200, 1 for an A100."""
    one, other = machine("h200"), machine("a100-80gb")
    return dataclasses.replace(one, gpus=tuple((one.gpu, other.gpu)[kind] for kind in kinds))


@pytest.mark.parametrize(
    ("kinds", "batch", "steps", "ranks", "devices", "parted"),
    [
        ((0, 0), 1, 4, 2, (0, 1), (1, 4)),
        ((0, 0, 0, 0), 1, 6, 3, (0, 1, 2), (1, 6)),
        ((0, 0, 0, 0), 4, 1, 4, (0, 1, 2, 3), (1, 4)),
        ((0, 0), 4, 1, 2, (0, 1), (2, 2)),
        ((0, 1, 0), 1, 4, 2, (0, 2), (1, 4)),
        ((0, 0), 1, 1, 1, (0,), (1, 1)),
    ],
)
def test_auto_takes_the_gpus_of_one_kind_that_share_a_step_evenly(
    config: Config,
    geometry: Geometry,
    kinds: tuple[int, ...],
    batch: int,
    steps: int,
    ranks: int,
    devices: tuple[int, ...],
    parted: tuple[int, int],
) -> None:
    asked = config(train__train_batch_size=batch, train__gradient_accumulation_steps=steps)
    found = planned(asked, geometry, several(*kinds))
    assert (found.ranks, found.devices) == (ranks, devices)
    assert (found.micro_batch_size, found.accumulation_steps) == parted
    assert row(found, "gpus").value == f"{ranks} of {len(kinds)}"


def test_idle_gpus_are_told_with_what_would_use_them(config: Config, geometry: Geometry) -> None:
    reason = row(planned(config(), geometry, several(0, 0, 0, 1)), "gpus").reason
    assert reason == (
        "a step has 1 sample: train.gradient_accumulation_steps: 3 makes a step of 3 on 3 GPUs, which takes"
        " about as long; 1 of another kind stays unused"
    )


def test_more_gpus_than_there_are_is_told_before_anything_starts(config: Config, geometry: Geometry) -> None:
    asked = config(train__gradient_accumulation_steps=8, parallel__gpus=4)
    with pytest.raises(HardwareError, match="4 GPUs are asked for, 2 of the kind of NVIDIA H200 are visible"):
        planned(asked, geometry, several(0, 0, 1))


def test_the_exchange_has_its_memory_and_the_time_is_shared(config: Config, geometry: Geometry) -> None:
    asked = functools.partial(config, train__gradient_accumulation_steps=2)
    one = planned(asked(parallel__gpus=1), geometry, several(0, 0))
    two = planned(asked(), geometry, several(0, 0))
    names = [part.name for part in two.train_memory]
    assert "exchange" in names and "exchange" not in [part.name for part in one.train_memory]
    assert two.budget_bytes == one.budget_bytes
    assert two.keep_bytes < one.keep_bytes


@pytest.mark.parametrize("asked", ["auto", 1])
def test_a_full_fine_tune_trains_on_one_gpu(config: Config, geometry: Geometry, asked: str | int) -> None:
    found = planned(config(method="full", parallel__gpus=asked), geometry, several(0, 0))
    assert (found.ranks, found.devices) == (1, (0,))
    assert row(found, "gpus").reason == "a full fine-tune trains on one GPU in this version"
