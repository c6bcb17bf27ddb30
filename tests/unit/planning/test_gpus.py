"""How many processes share a run's steps, and what the plan says of it."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest

from tests.golden.plans import ROOT, load_shipped
from tests.unit.planning.conftest import GIB, machine
from tests.unit.planning.test_resolve import Config, on_each_kind, plan, row
from trainer.config.schema import RunConfig, changed
from trainer.errors import ConfigError, HardwareError
from trainer.families import get
from trainer.machine.facts import Facts, LinkVerdict
from trainer.planning.choose import candidates, swap_and_shard
from trainer.planning.cost import memory
from trainer.planning.cost.storage import Storage
from trainer.planning.plan import Plan
from trainer.planning.shapes.geometry import Geometry, Linears, Stack
from trainer.planning.shapes.run_shapes import run_geometry


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
        (
            {
                "train__gradient_accumulation_steps": 2,
                "parallel__gpus": 2,
                "method": "full",
                "parallel__shard": "none",
            },
            "parallel.shard: none keeps trained weights whole, which one process alone does",
        ),
        (
            {
                "train__gradient_accumulation_steps": 2,
                "parallel__gpus": 2,
                "method": "full",
                "model__dtype": "fp32",
                "train__optimizer": "adamw_8bit",
            },
            "adamw_8bit keeps its state for whole weights, not for rows of them",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(
    config: Config, geometry: Geometry, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(config(**changes), geometry)


KINDS = ("h200", "a100-80gb", "rtx-4090")
"""Recorded machines whose GPUs `several` takes."""


def several(*kinds: int, **changes: Any) -> Facts:
    """A machine with GPUs of several kinds, by number: 0 for an H200, 1 for an A100, 2 for an RTX 4090."""
    gpus = [machine(name).gpu for name in KINDS]
    return dataclasses.replace(machine("h200"), gpus=tuple(gpus[kind] for kind in kinds), **changes)


@pytest.mark.parametrize(
    ("kinds", "batch", "steps", "ranks", "devices", "parted"),
    [
        ((0, 0), 1, 4, 2, (0, 1), (1, 4)),
        ((0, 0, 0, 0), 1, 6, 3, (0, 1, 2), (1, 6)),
        ((0, 0, 0, 0), 4, 1, 4, (0, 1, 2, 3), (1, 4)),
        ((0, 0), 4, 1, 2, (0, 1), (2, 2)),
        ((0, 1, 0), 1, 4, 2, (0, 2), (1, 4)),
        ((0, 0), 1, 1, 1, (0,), (1, 1)),
        ((0, 1, 1), 1, 4, 1, (0,), (1, 4)),  # one that is predicted to be faster than two of another kind
        ((1, 1, 1, 1, 2), 1, 4, 4, (0, 1, 2, 3), (1, 4)),
        ((1, 1, 0, 0), 1, 4, 2, (2, 3), (1, 4)),  # of equal numbers those with the most memory
        ((1, 0, 1), 1, 1, 1, (1,), (1, 1)),  # one GPU: the one with the most memory
        ((2, 0), 1, 4, 1, (1,), (1, 4)),
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


def test_the_plan_is_of_the_kind_that_was_taken(config: Config, geometry: Geometry) -> None:
    """Profile, budget, attention and rates follow it, not the GPU that is visible first."""
    steps = functools.partial(config, train__gradient_accumulation_steps=4)
    pair = planned(steps(), geometry, several(1, 0, 0, verdicts=()))
    alone = planned(steps(parallel__gpus=2), geometry, several(0, 0, verdicts=()))
    assert (pair.profile, pair.devices) == ("hopper-fp8", (1, 2))
    follows = ("profile", "budget_bytes", "attention", "weights", "step_milliseconds", "train_memory")
    assert all(vars(pair)[name] == vars(alone)[name] for name in follows)
    other = planned(steps(), geometry, several(2, 0))
    assert (other.profile, other.devices, other.first_device) == ("hopper-fp8", (1,), "cuda:1")


def test_gpus_that_were_taken_and_left_out_are_named(config: Config, geometry: Geometry) -> None:
    steps = functools.partial(config, train__gradient_accumulation_steps=4)
    assert row(planned(steps(), geometry, several(1, 0, 0)), "gpus").reason == (
        "each takes 2 of a step's 4 micro-batches; batch and rate are the whole run's; on GPU 1 and 2, NVIDIA"
        " H200; left out, of another kind: 1 NVIDIA A100-SXM4-80GB; on 1 NVIDIA A100-SXM4-80GB with weights"
        " in bf16, which is less precise or slower"
    )
    assert row(planned(steps(), geometry, several(2, 0)), "gpus").reason.startswith(
        "on GPU 1, NVIDIA H200, with the most memory; left out, of another kind: 1 NVIDIA GeForce RTX 4090;"
        " on 1 NVIDIA GeForce RTX 4090 with weights in "
    )
    written = row(planned(steps(parallel__gpus=1), geometry, several(2, 0, 2)), "gpus")
    assert (written.value, written.source) == ("1 of 3", "parallel.gpus")
    assert written.reason.startswith("as written; on GPU 1, NVIDIA H200, with the most memory; left out")


def test_idle_gpus_are_told_with_what_would_use_them(config: Config, geometry: Geometry) -> None:
    reason = row(planned(config(), geometry, several(0, 0, 0, 1)), "gpus").reason
    assert reason.startswith(
        "a step has 1 sample: train.gradient_accumulation_steps: 3 makes a step of 3 on 3 GPUs, which takes"
        " about as long; on GPU 0, NVIDIA H200"
    )


@pytest.mark.parametrize(
    ("batch", "gpus", "advised"), [((2, 1), 8, (4, 8)), ((2, 1), 3, (3, 6)), ((4, 3), 8, (4, 16))]
)
def test_the_step_that_would_use_idle_gpus_is_told_as_it_may_be_written(
    config: Config, geometry: Geometry, batch: tuple[int, int], gpus: int, advised: tuple[int, int]
) -> None:
    """Beside the batch that the user wrote, not the smaller one into which the plan parted it."""
    size, steps = batch
    asked = config(train__train_batch_size=size, train__gradient_accumulation_steps=steps)
    written, samples = advised
    told = row(planned(asked, geometry, several(*(0,) * gpus)), "gpus").reason
    assert f"accumulation_steps: {written} makes a step of {samples} on {gpus} GPUs" in told
    follows = config(train__train_batch_size=size, train__gradient_accumulation_steps=written)
    found = planned(follows, geometry, several(*(0,) * gpus))
    assert (found.ranks, found.micro_batch_size * found.accumulation_steps) == (gpus, samples)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ((0, 0), "4 GPUs are asked for, visible are 2 NVIDIA H200"),
        (
            (0, 1, 1, 0, 1),
            "4 GPUs of one kind are asked for, visible are 2 NVIDIA H200 and 3 NVIDIA A100-SXM4-80GB",
        ),
    ],
)
def test_more_gpus_than_there_are_of_any_kind_is_told_before_anything_starts(
    config: Config, geometry: Geometry, kinds: tuple[int, ...], words: str
) -> None:
    asked = config(train__gradient_accumulation_steps=8, parallel__gpus=4)
    with pytest.raises(HardwareError, match=words) as caught:
        planned(asked, geometry, several(*kinds))
    most = max(kinds.count(kind) for kind in kinds)
    assert caught.value.problems[0].remedy == f"write {most} or less, or auto"


def test_a_written_number_takes_the_kind_that_has_so_many(config: Config, geometry: Geometry) -> None:
    steps = functools.partial(config, train__gradient_accumulation_steps=6)
    facts = several(0, 0, 1, 1, 1)
    assert planned(steps(parallel__gpus=3), geometry, facts).devices == (2, 3, 4)
    assert planned(steps(parallel__gpus=2), geometry, facts).devices == (0, 1)


def resized(facts: Facts, *gib: float) -> Facts:
    """The machine with GPUs of the first one's kind, of these sizes."""
    sizes = (int(size * GIB) for size in gib)
    return dataclasses.replace(
        facts, gpus=tuple(dataclasses.replace(facts.gpu, total_memory_bytes=size) for size in sizes)
    )


def test_gpus_of_one_name_with_other_memory_are_another_kind(config: Config, geometry: Geometry) -> None:
    steps = functools.partial(config, train__gradient_accumulation_steps=4)
    facts = resized(machine("a100-80gb"), 40, 80, 80)
    assert planned(steps(), geometry, facts).devices == (1, 2)


def test_the_budget_is_that_of_the_gpu_with_the_least_memory(config: Config, geometry: Geometry) -> None:
    """A display takes some of one of them: the same kind, and every rank keeps within what that one has."""
    steps = functools.partial(config, train__gradient_accumulation_steps=2)
    least = planned(steps(), geometry, resized(machine("a100-80gb"), 80, 79.2))
    assert least.ranks == 2
    assert least.budget_bytes == int(0.93 * int(79.2 * GIB))
    not_taken = planned(steps(), geometry, resized(machine("a100-80gb"), 80, 80, 79.2))
    assert not_taken.devices == (0, 1)
    assert not_taken.budget_bytes == int(0.93 * 80 * GIB)


def test_a_larger_group_on_which_the_run_does_not_fit_is_passed_over(
    config: Config, geometry: Geometry
) -> None:
    small = dataclasses.replace(machine("a100-80gb").gpu, name="small", total_memory_bytes=2 * GIB)
    facts = several(0)
    facts = dataclasses.replace(facts, gpus=(small, small, *facts.gpus))
    found = planned(config(train__gradient_accumulation_steps=4), geometry, facts)
    assert (found.ranks, found.devices, found.profile) == (1, (2,), "hopper-fp8")
    assert "; on 2 small the run does not fit: it needs " in row(found, "gpus").reason
    with pytest.raises(HardwareError, match="the run does not fit"):
        planned(config(), geometry, dataclasses.replace(facts, gpus=(small, small)))


def test_a_kind_that_torch_does_not_run_on_is_passed_over(config: Config, geometry: Geometry) -> None:
    old = dataclasses.replace(machine("a100-80gb").gpu, name="old", capability=(3, 7))
    facts = dataclasses.replace(several(2), gpus=(old, old, several(2).gpu))
    found = planned(config(train__gradient_accumulation_steps=4), geometry, facts)
    assert found.devices == (2,)
    assert "not on 2 old: carries no code for old (sm_37)" in row(found, "gpus").reason


def test_what_was_measured_on_one_kind_says_nothing_of_another(config: Config, geometry: Geometry) -> None:
    steps = config(train__gradient_accumulation_steps=4)
    measured = tuple(dataclasses.replace(one, gpu="NVIDIA H200") for one in machine("h200").verdicts)
    pair = planned(steps, geometry, several(1, 1, verdicts=measured))
    assert row(pair, "attention").source != "auto (measured)"
    first = planned(steps, geometry, several(0, 0, 1, verdicts=measured))
    assert row(first, "attention").source == "auto (measured)"


def test_the_exchange_has_its_memory_and_the_time_is_shared(config: Config, geometry: Geometry) -> None:
    asked = functools.partial(config, train__gradient_accumulation_steps=2)
    one = planned(asked(parallel__gpus=1), geometry, several(0, 0))
    two = planned(asked(), geometry, several(0, 0))
    names = [part.name for part in two.train_memory]
    assert "exchange" in names and "exchange" not in [part.name for part in one.train_memory]
    assert two.budget_bytes == one.budget_bytes
    assert two.keep_bytes < one.keep_bytes


def with_available(facts: Facts, gib: int) -> Facts:
    return dataclasses.replace(facts, memory=dataclasses.replace(facts.memory, available_bytes=gib * GIB))


def test_host_memory_is_that_of_all_processes(shared: Config, geometry: Geometry) -> None:
    facts = with_available(several(0, 0), 48)
    one, two = (planned(shared(parallel__gpus=count), geometry, facts) for count in (1, 2))
    each = {part.name: part.bytes for part in one.host_memory}
    both = {part.name: part.bytes for part in two.host_memory}
    assert {name: both[name] for name in ("process", "loading")} == {
        name: 2 * each[name] for name in ("process", "loading")
    }
    left = 48 * GIB - both["process"] - both["loading"]
    assert two.keep_bytes == left // 2 // 8
    assert both["data"] == 2 * two.keep_bytes
    assert row(two, "cache_in_memory").reason.endswith(" that the run leaves to each of 2 processes")


def test_auto_takes_fewer_gpus_where_host_memory_is_short_and_says_so(
    shared: Config, geometry: Geometry
) -> None:
    """One process takes 4 GiB of the host's memory."""
    two = planned(shared(), geometry, with_available(several(0, 0, 0, 0), 9))
    assert (two.ranks, two.devices) == (2, (0, 1))
    assert row(two, "gpus").reason == (
        "each takes 2 of a step's 4 micro-batches; batch and rate are the whole run's; 4 training processes"
        " need 16.0 GiB of host memory, 9.0 GiB are available"
    )
    assert not any("host memory" in text for text in two.warnings)
    assert planned(shared(), geometry, with_available(several(0, 0, 0, 0), 16)).ranks == 4
    # one process is not refused for it, and what was written neither: its prediction is told
    one = planned(shared(), geometry, with_available(several(0, 0), 3))
    assert one.ranks == 1
    assert "the training process needs 4.0 GiB of host memory, 3.0 GiB are available" in one.warnings
    asked = planned(shared(parallel__gpus=4), geometry, with_available(several(0, 0, 0, 0), 9))
    assert asked.ranks == 4
    assert "the 4 training processes need 16.0 GiB of host memory, 9.0 GiB are available" in asked.warnings


def test_blocks_that_wait_in_host_memory_wait_there_once_for_all(shared: Config, geometry: Geometry) -> None:
    """The geometry's base waits in 2 GiB; each process has 4 GiB beside it."""
    stack = Stack(name="blocks", blocks=57, quantized=Linears(parameters=GIB // 57), others=0, fp32=0)
    geometry = dataclasses.replace(geometry, stacks=(stack,))
    asked = functools.partial(shared, features__block_swap=57, features__weights="bf16")
    one, two = (
        {
            part.name: part.bytes
            for part in planned(asked(parallel__gpus=count), geometry, several(0, 0)).host_memory
        }
        for count in (1, 2)
    )
    assert two["waiting blocks"] == one["waiting blocks"] > 1.5 * GIB
    facts = with_available(several(0, 0), 9)
    assert planned(asked(), geometry, facts).ranks == 1
    with pytest.raises(HardwareError, match=r"the 2 processes need 1\d\.\d GiB of it, and 9\.0 GiB are"):
        planned(asked(parallel__gpus=2), geometry, facts)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            "auto",
            "the fewest on which a full fine-tune fits: with parallel.gpus: N as many share a step's"
            " micro-batches",
        ),
        (1, "as written"),
    ],
)
def test_a_full_fine_tune_that_fits_trains_on_one_gpu(
    shared: Config, geometry: Geometry, asked: str | int, why: str
) -> None:
    found = planned(shared(method="full", parallel__gpus=asked), geometry, several(0, 0))
    assert (found.ranks, found.devices, found.in_rows) == (1, (0,), False)
    assert row(found, "gpus").reason == why


def test_a_full_fine_tune_over_four_gpus_has_a_quarter_of_its_rows_on_each(
    shared: Config, geometry: Geometry
) -> None:
    one, four = (
        planned(shared(method="full", parallel__gpus=count), in_blocks(geometry), several(0, 0, 0, 0))
        for count in (1, 4)
    )
    assert (four.ranks, four.in_rows, four.sharded_blocks, four.shard_group) == (4, True, 0, 1)
    sizes = [{part.name: part.bytes for part in found.train_memory} for found in (one, four)]
    for name in ("trained weights", "gradients", "optimizer state"):
        assert sizes[1][name] == pytest.approx(sizes[0][name] / 4, rel=1e-6)
    # two blocks whole, in turn, and all that lies outside of them
    block, outside = 2 * GIB // 57, 2 * 1024**3 - 57 * (2 * GIB // 57)
    assert sizes[1]["gathered blocks"] == 2 * (2 * block + outside)
    assert "exchange" not in sizes[1]
    assert row(four, "shard").value == "rows over 4"
    told = row(four, "exchange").reason
    assert "for both passes of 1 round, and sums of its gradients in fp32; " in told
    assert "guessed at 270 GB/s" in told and "guessed at 270 GB/s" in row(four, "step_time").reason
    assert row(four, "cuda_graphs").value == "off"
    alone = four.of_one_process
    assert (alone.ranks, alone.in_rows) == (1, False)


def test_weights_that_are_trained_in_fp8_lie_in_even_rows(shared: Config, geometry: Geometry) -> None:
    asked = functools.partial(shared, method="full", features__compute="fp8")
    hopper = dataclasses.replace(machine("h200"), gpus=machine("h200").gpus * 4)
    alone, two = (planned(asked(parallel__gpus=count), in_blocks(geometry), hopper) for count in (1, 2))
    assert (two.ranks, two.compute, two.in_rows) == (2, "fp8", True)
    # gathered bytes are transposed for each product
    assert (alone.weight_copies, two.weight_copies) == (2, 1)
    sizes = [{part.name: part.bytes for part in plan.train_memory} for plan in (alone, two)]
    assert 4 * sizes[1]["fp8 weights"] == pytest.approx(sizes[0]["fp8 weights"], rel=0.01)
    bf16 = planned(shared(method="full", parallel__gpus=2), in_blocks(geometry), hopper)
    whole = {part.name: part.bytes for part in bf16.train_memory}
    assert sizes[1]["gathered blocks"] < whole["gathered blocks"]
    with pytest.raises(ConfigError, match=r"features\.compute: fp8 parts weights evenly, whose rows are"):
        planned(asked(parallel__gpus=3), in_blocks(geometry), hopper)


def test_auto_takes_as_few_gpus_as_a_full_fine_tune_fits_on(shared: Config, geometry: Geometry) -> None:
    """The geometry's two billion parameters train in some 23 GiB, without fp32 masters in less than 22."""
    small = dataclasses.replace(machine("a100-80gb").gpu, total_memory_bytes=22 * GIB)
    facts = dataclasses.replace(several(0), gpus=(small,) * 4)
    found = planned(shared(method="full"), in_blocks(geometry), facts)
    assert (found.ranks, found.in_rows) == (2, True)
    assert "on 1 NVIDIA A100-SXM4-80GB with weights in bf16, rounded by chance" in row(found, "gpus").reason
    alone = planned(shared(method="full", parallel__gpus=1), in_blocks(geometry), facts)
    assert (alone.ranks, alone.optimizer) == (1, "adamw_stochastic_bf16")


def in_blocks(geometry: Geometry) -> Geometry:
    """The geometry with a base of 57 blocks in bf16, 4 GiB."""
    stack = Stack(name="blocks", blocks=57, quantized=Linears(parameters=2 * GIB // 57), others=0, fp32=0)
    return dataclasses.replace(geometry, stacks=(stack,))


def test_a_base_over_two_gpus_takes_half_the_memory(shared: Config, geometry: Geometry) -> None:
    whole, half = (
        planned(shared(parallel__shard=shard, features__weights="bf16"), in_blocks(geometry), several(0, 0))
        for shard in ("none", "full")
    )
    assert (whole.sharded_blocks, whole.shard_group) == (0, 1)
    assert (half.sharded_blocks, half.shard_group, half.swapped_blocks) == (57, 2, 0)
    sizes = [{part.name: part.bytes for part in one.train_memory} for one in (whole, half)]
    assert sizes[0]["base weights"] - sizes[1]["base weights"] == pytest.approx(2 * GIB, rel=0.05)
    assert sizes[1]["blocks passing through"] == 2 * (4 * GIB // 114 * 2)
    assert row(half, "shard").value == "57 of 57 blocks over 2"
    assert row(half, "cuda_graphs").value == "on"
    alone = half.of_one_process
    assert (alone.ranks, alone.devices, alone.sharded_blocks, alone.shard_group) == (1, (0,), 0, 1)


def test_one_process_has_nothing_to_share_and_the_plan_says_so(shared: Config, geometry: Geometry) -> None:
    found = planned(shared(parallel__shard="full"), in_blocks(geometry), several(0))
    assert found.sharded_blocks == 0
    told = row(found, "shard")
    assert (told.value, told.source) == ("none", "parallel.shard")
    assert "nothing to share with" in told.reason


def test_no_block_waits_in_host_memory_beside_a_base_that_is_shared(
    shared: Config, geometry: Geometry
) -> None:
    """A run that does not fit is told, not planned in two places at once."""
    asked = shared(parallel__shard="full", features__weights="bf16", features__memory_budget="3GiB")
    with pytest.raises(HardwareError, match="the run does not fit"):
        planned(asked, in_blocks(geometry), several(0, 0))
    written = shared(parallel__shard="full", features__block_swap=3, parallel__gpus=2)
    with pytest.raises(HardwareError, match="the blocks lie with the GPUs of the run"):
        planned(written, in_blocks(geometry), several(0, 0))


def test_gpus_that_cannot_read_each_other_share_no_base(shared: Config, geometry: Geometry) -> None:
    with pytest.raises(HardwareError, match="cannot read each other's memory"):
        planned(shared(parallel__shard="full"), in_blocks(geometry), several(2, 2))


LINK = LinkVerdict(gpus=2, works=True, gib_per_second=340.0, exchange_ms=0.6, reason="right")


def linked(*kinds: int, **changes: Any) -> Facts:
    """A machine with GPUs whose way to each other was measured."""
    return several(*kinds, links=(dataclasses.replace(LINK, gpus=len(kinds), **changes),))


def limited(shared: Config, budget: str, **changes: Any) -> RunConfig:
    written = {
        "features__weights": "bf16",
        "features__activation_checkpointing": False,
        "features__activation_budget": 1.0,
        **changes,
    }
    return shared(features__memory_budget=budget, **written)


def test_auto_shares_no_block_where_a_whole_base_fits(shared: Config, geometry: Geometry) -> None:
    found = planned(shared(features__weights="bf16"), in_blocks(geometry), linked(0, 0))
    assert (found.ranks, found.sharded_blocks, found.shard_group) == (2, 0, 1)
    assert (row(found, "shard").value, row(found, "shard").reason) == (
        "none",
        "each has a whole base, and it fits",
    )


@pytest.mark.parametrize("budget", ["9GiB", "8.7GiB", "8.4GiB"])
def test_auto_shares_the_fewest_blocks_that_fit(shared: Config, geometry: Geometry, budget: str) -> None:
    """Every smaller number is tried by hand, as the memory table has it."""
    whole = planned(limited(shared, "auto"), in_blocks(geometry), linked(0, 0))
    found = planned(limited(shared, budget), in_blocks(geometry), linked(0, 0))
    assert 0 < found.sharded_blocks < 57 and found.shard_group == 2
    assert sum(part.bytes for part in whole.train_memory) > found.budget_bytes
    usable = float(budget.removesuffix("GiB")) * GIB * 0.98
    parts = {part.name: part.bytes for part in found.train_memory}
    block = 4 * GIB / 57
    assert 0 <= usable - sum(parts.values()) < block  # half a block fewer each, and its part of what is lost
    told = row(found, "shard")
    assert (told.value, told.source) == (f"{found.sharded_blocks} of 57 blocks over 2", "auto")
    assert "at 340 GiB/s as measured" in told.reason and "whole on each GPU it needs" in told.reason


def test_no_fewer_shared_blocks_fit_where_the_need_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUX.2 has blocks of two sizes: what more of them need does not fall with each."""
    monkeypatch.chdir(ROOT)
    shipped = load_shipped(Path("train_configs/flux2_dev_lora.yaml")).config
    asked = changed(shipped, {"train.gradient_accumulation_steps": 4})

    @functools.cache
    def made(dtype: str) -> Geometry:
        return run_geometry(get("flux2_dev"), asked, model_folder=None, dtype=dtype)

    ((one, _),) = on_each_kind(asked, linked(0, 0, 0, 0), lambda changed, dtype: made(dtype))
    situation = dataclasses.replace(one, ranks=4)
    ways, _ = candidates.ladder(situation)
    settings = list(candidates.storages(situation, ways, "cudnn", compiled=True))
    jumped = 0
    for gib in (55, 57, 59):
        for found in swap_and_shard.shared(situation, settings, gib * GIB):

            def needed(count: int, found: Storage = found) -> int:
                trial = dataclasses.replace(found, sharded=count, tiling=True)
                return memory.total(memory.train_rows(trial, situation.geometry))

            if needed(found.sharded) <= gib * GIB:
                needs = [needed(count) for count in range(1, found.sharded + 1)]
                assert min(needs[:-1], default=gib * GIB + 1) > gib * GIB
                jumped += needs != sorted(needs, reverse=True)
    assert jumped


def test_more_gpus_make_a_larger_group_only_where_a_pair_does_not_suffice(
    shared: Config, geometry: Geometry
) -> None:
    pair = planned(limited(shared, "8.4GiB"), in_blocks(geometry), linked(0, 0, 0, 0))
    assert (pair.ranks, pair.shard_group) == (4, 2)
    four = planned(limited(shared, "7.5GiB"), in_blocks(geometry), linked(0, 0, 0, 0))
    assert (four.ranks, four.shard_group) == (4, 4)
    with pytest.raises(HardwareError, match="57 blocks over 4 GPUs"):
        planned(limited(shared, "5GiB", parallel__gpus=4), in_blocks(geometry), linked(0, 0, 0, 0))


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (several(0, 0), "was not measured"),
        (linked(0, 0, works=False, reason="GPU 0 read other bytes"), "failing: GPU 0 read other bytes"),
    ],
)
def test_auto_shares_only_over_a_way_that_was_seen_to_work(
    shared: Config, geometry: Geometry, facts: Facts, why: str
) -> None:
    with pytest.raises(HardwareError, match="does not fit"):
        planned(limited(shared, "9GiB"), in_blocks(geometry), facts)
    assert why in row(planned(limited(shared, "auto"), in_blocks(geometry), facts), "shard").reason
    # what is written is tried whatever was measured, and the run says itself what does not work
    found = planned(limited(shared, "9GiB", parallel__shard="full"), in_blocks(geometry), facts)
    assert found.sharded_blocks == 57


def test_the_row_compares_with_what_would_fit_whole(shared: Config, geometry: Geometry) -> None:
    found = planned(
        shared(features__memory_budget="9GiB", features__weights="bf16", features__compile=False),
        in_blocks(geometry),
        linked(0, 0),
    )
    assert found.weights == "bf16" and found.sharded_blocks
    assert re.search(
        r"whole on each GPU it fits in bf16, \d+ blocks recomputed: \d+ ms a micro-batch predicted, this \d+",
        row(found, "shard").reason,
    )


def test_a_slow_way_shows_in_the_predicted_time(shared: Config, geometry: Geometry) -> None:
    times = [
        planned(shared(parallel__shard="full"), in_blocks(geometry), linked(0, 0, gib_per_second=rate))
        for rate in (340.0, 1.0)
    ]
    fast, slow = (one.step_milliseconds for one in times)
    assert slow - fast > 1000 * 2 * 1.9 / 1.0 * 0.27  # nearly 2 GiB, read twice


def test_the_exchange_is_told_with_its_bytes_and_its_measured_time(
    shared: Config, geometry: Geometry
) -> None:
    found = row(planned(shared(), geometry, linked(0, 0)), "exchange")
    size = geometry.lora_parameters * (2 * 2 + 4) / 2
    assert (found.value, found.source) == (f"{size / 2**20:.0f} MiB a step", "auto (measured)")
    assert "in 2 rounds" in found.reason
    unmeasured = row(planned(shared(), geometry, several(0, 0)), "exchange")
    assert (unmeasured.value, unmeasured.source) == (found.value, "auto")


def test_rows_of_weights_say_at_which_rate_they_travel(shared: Config, geometry: Geometry) -> None:
    asked = shared(method="full", parallel__gpus=2)
    none: dict[str, Any] = {"gib_per_second": 0.0, "works": False}
    for changes, rate in (
        ({}, "counted at 270 GB/s, as over two H200's NVLink: the probe found no slower way"),
        ({"gib_per_second": 50.0}, "counted at 54 GB/s, of the probe's copies"),
        (none, "counted at 168 GB/s, of the probe's exchange"),
        (none | {"exchange_ms": 0.0}, "guessed at 270 GB/s, as over two H200's NVLink: no rate was measured"),
    ):
        facts = linked(0, 0, **changes)
        found = planned(asked, in_blocks(geometry), facts)
        assert f"travels is {rate}" in row(found, "exchange").reason
        assert f"travels is {rate}" in row(found, "step_time").reason


def test_bytes_of_rows_in_fp8_are_those_that_the_time_is_of(shared: Config, geometry: Geometry) -> None:
    plain, fp8 = (
        row(
            planned(shared(method="full", parallel__gpus=2, **asked), in_blocks(geometry), linked(0, 0)),
            "exchange",
        )
        for asked in ({}, {"features__compute": "fp8"})
    )
    # half of the weights are in linears: a byte less of each, twice, of one of two GPUs' share in two rounds
    less = 2 * 0.5 * 2 * GIB
    assert float(plain.value.split()[0]) - float(fp8.value.split()[0]) == pytest.approx(less / GIB, abs=0.2)
