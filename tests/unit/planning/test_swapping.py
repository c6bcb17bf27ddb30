"""Blocks that wait in host memory: the last resort of `auto`, refused where it makes no sense."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.golden.plans import ROOT, load_shipped
from tests.unit.planning.conftest import GIB, kept, machine, way_of, with_gpu
from trainer import families
from trainer.config.reading.load import Loaded
from trainer.config.schema import RunConfig
from trainer.errors import HardwareError
from trainer.machine.facts import Facts
from trainer.planning.cost import roofline
from trainer.planning.cost.memory import elsewhere_bytes, host_rows, read_bytes, total, train_rows
from trainer.planning.cost.storage import Storage
from trainer.planning.plan import Decision, Plan
from trainer.planning.planning import plan_run
from trainer.planning.shapes.geometry import (
    TABLES,
    ComponentGeometry,
    Geometry,
    Linears,
    Stack,
    read_table,
    stacks,
)

Config = Callable[..., RunConfig]
STACK = Stack(
    name="blocks", blocks=10, quantized=Linears(parameters=GIB // 16, rows=1024), others=1024 * 1024, fp32=0
)


@pytest.fixture
def stacked(geometry: Geometry) -> Geometry:
    """The test geometry with 10 blocks, which are more than half of its values."""
    return dataclasses.replace(geometry, blocks=10, stacks=(STACK,))


def storage(**changes: Any) -> Storage:
    plain = Storage(
        method="lora",
        device="cuda",
        dtype="bf16",
        way=way_of(changes),
        checkpointing=True,
        tiling=False,
        previews=False,
        attention="flash",
    )
    return dataclasses.replace(plain, **changes)


def shipped(name: str, **changes: Any) -> Loaded:
    """A shipped configuration with `section__key` changed."""
    loaded = load_shipped(ROOT / "train_configs" / f"{name}.yaml")
    config = loaded.config
    sources = dict(loaded.sources)
    for key, value in changes.items():
        section, _, field = key.partition("__")
        if field:
            config = config.model_copy(
                update={section: vars(config)[section].model_copy(update={field: value})}
            )
        else:
            config = config.model_copy(update={key: value})
        sources[key.replace("__", ".")] = "my.yaml:7"
    return Loaded(config=config, sources=sources)


def planned(loaded: Loaded, facts: Facts) -> Plan:
    return plan_run(loaded, facts, find_model=lambda _: None)


def row(plan: Plan, feature: str) -> Decision:
    return next(decision for decision in plan.decisions if decision.feature == feature)


def roomy(facts: Facts, gib: float) -> Facts:
    """The machine with so much host memory available."""
    return dataclasses.replace(
        facts, memory=dataclasses.replace(facts.memory, available_bytes=int(gib * GIB))
    )


def without_bitsandbytes(facts: Facts) -> Facts:
    packages = {name: version for name, version in facts.packages.items() if name != "bitsandbytes"}
    return dataclasses.replace(facts, packages=packages)


def test_the_largest_model_trains_on_a_24_gb_card() -> None:
    plan = planned(shipped("flux2_dev_lora"), machine("rtx-4090"))
    assert (plan.weights, plan.activation_checkpointing, plan.cuda_graphs) == ("nf4", True, False)
    assert 5 <= plan.swapped_blocks <= 15
    assert plan.peak_bytes <= 0.97 * plan.budget_bytes
    decision = row(plan, "block_swap")
    assert (decision.value, decision.source) == (str(plan.swapped_blocks), "auto")
    assert decision.reason == (
        f"nothing smaller fits: without it training needs 23.5 GiB; {plan.swapped_blocks} of 56 blocks wait"
        " in host memory"
    )
    assert "waiting blocks" in {row.name for row in plan.host_memory}
    assert "blocks passing through" in {row.name for row in plan.train_memory}


def test_one_block_fewer_does_not_fit() -> None:
    facts = machine("rtx-4090")
    fewest = planned(shipped("flux2_dev_lora"), facts).swapped_blocks
    explicit = planned(shipped("flux2_dev_lora", features__block_swap=fewest), facts)
    assert explicit.swapped_blocks == fewest
    assert row(explicit, "block_swap").source == "my.yaml:7"
    with pytest.raises(HardwareError, match=f"{fewest - 1} blocks in host memory") as caught:
        planned(shipped("flux2_dev_lora", features__block_swap=fewest - 1), facts)
    assert "features.block_swap: auto" in str(caught.value)


@pytest.mark.parametrize(
    ("features", "kept"),
    [
        ({"activation_checkpointing": False}, (False, 0, 1.0)),
        ({"activation_checkpointing": 20}, (True, 20, 1.0)),
        ({"activation_checkpointing": True}, (True, 0, 1.0)),
        ({"activation_budget": 0.6}, (False, 0, 0.6)),
    ],
)
def test_waiting_blocks_go_with_every_way_to_keep_activations_and_with_graphs(
    features: dict[str, Any], kept: tuple[bool, int, float]
) -> None:
    written = {"block_swap": 6, "cuda_graphs": True, "compile": True, **features}
    keys = {f"features__{key}": value for key, value in written.items()}
    plan = planned(shipped("flux1_dev_lora", **keys), machine("a100-80gb"))
    assert (plan.swapped_blocks, plan.cuda_graphs) == (6, True)
    assert (plan.activation_checkpointing, plan.recomputed_blocks, plan.activation_budget) == kept


def test_a_pass_reads_one_of_two_copies_unless_it_repeats_the_other(stacked: Geometry) -> None:
    def found(copies: int, *, repeats: bool) -> tuple[tuple[int, int], int]:
        fp8 = storage(weights="fp8", compute="fp8", weight_copies=copies, swapped=4, checkpointing=repeats)
        rows = {row.name: row.bytes for row in train_rows(fp8, stacked)}
        return read_bytes(fp8, stacked), rows["blocks passing through"]

    (once, again), pages = found(1, repeats=False)
    assert once == again
    (whole, repeated), both = found(2, repeats=True)
    assert whole == repeated and 1.5 * once < whole < 2 * once and 1.5 * pages < both < 2 * pages
    # two blocks, of the last one both copies
    assert found(2, repeats=False) == ((once, once), pages // 2 * 3)


@pytest.mark.parametrize(
    ("changes", "bytes_of_one"),
    [
        ({"weights": "bf16"}, 2),
        ({"weights": "int8"}, 1),
        ({"weights": "fp8", "compute": "fp8", "weight_copies": 2}, 2),
        ({"weights": "fp8", "compute": "fp8", "modulation": "int8"}, 1),
    ],
)
def test_backward_reads_no_modulation(stacked: Geometry, changes: dict[str, Any], bytes_of_one: int) -> None:
    half = Linears(parameters=512 * 1024, rows=0, largest=512 * 1024)
    every = dataclasses.replace(half, parameters=10 * half.parameters)
    stack = dataclasses.replace(STACK, modulation=half)
    found = dataclasses.replace(stacked, stacks=(stack,), modulation=every)
    forward, backward = read_bytes(storage(swapped=4, checkpointing=False, **changes), found)
    assert forward - backward == 4 * half.parameters * bytes_of_one
    forward, backward = read_bytes(storage(swapped=4, checkpointing=True, **changes), found)
    assert forward == backward


@pytest.mark.parametrize("name", ["dgx-spark", "h200", "a100-80gb"])
def test_nothing_waits_where_all_fits(name: str) -> None:
    plan = planned(shipped("flux1_dev_lora"), machine(name))
    assert plan.swapped_blocks == 0
    assert "block_swap" not in {decision.feature for decision in plan.decisions}
    assert "waiting blocks" not in {row.name for row in plan.host_memory}


def test_nothing_waits_where_smaller_weights_or_batches_fit() -> None:
    assert planned(shipped("flux1_dev_lora"), machine("rtx-4090")).swapped_blocks == 0
    large = shipped("flux1_dev_lora", train__train_batch_size=16)
    plan = planned(large, machine("rtx-4090"))
    assert (plan.swapped_blocks, plan.micro_batch_size < 16) == (0, True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dgx-spark", "CPU and GPU share one memory: moving weights frees nothing"),
        ("cpu", "training on a CPU has all weights in host memory"),
    ],
)
def test_shared_memory_refuses_a_written_number(name: str, reason: str) -> None:
    with pytest.raises(HardwareError, match=reason) as caught:
        planned(shipped("flux1_dev_lora", features__block_swap=4), machine(name))
    assert "features.block_swap" in str(caught.value) and "my.yaml:7" in str(caught.value)


def test_shared_memory_never_swaps() -> None:
    """This holds for every integrated GPU, whatever the profile is called."""
    facts = with_gpu(machine("rtx-4090"), integrated=True)
    with pytest.raises(HardwareError, match=r"training needs 23\.5 GiB at least"):
        planned(shipped("flux2_dev_lora"), facts)
    with pytest.raises(HardwareError, match="CPU and GPU share one memory"):
        planned(shipped("flux2_dev_lora", features__block_swap=20), facts)


def test_no_more_blocks_than_there_are() -> None:
    with pytest.raises(HardwareError, match="57 blocks are to wait in host memory, the model has 56"):
        planned(shipped("flux2_dev_lora", features__block_swap=57), machine("rtx-4090"))


def test_zero_is_never() -> None:
    with pytest.raises(HardwareError, match=r"training needs 23\.5 GiB at least") as caught:
        planned(shipped("flux2_dev_lora", features__block_swap=0), machine("rtx-4090"))
    assert "fits with features.block_swap: auto" in str(caught.value)


def test_a_host_that_is_too_small_is_told() -> None:
    facts = roomy(machine("rtx-4090"), 5)
    with pytest.raises(HardwareError) as caught:
        planned(shipped("flux2_dev_lora"), facts)
    assert "blocks waiting in host memory the process needs" in str(caught.value)
    assert "5.0 GiB are available" in str(caught.value)
    with pytest.raises(HardwareError, match=r"features.block_swap: with 40 of 56 blocks waiting"):
        planned(shipped("flux2_dev_lora", features__block_swap=40), facts)


def test_what_does_not_fit_with_all_blocks_waiting_says_so() -> None:
    facts = with_gpu(machine("rtx-4090"), total_memory_bytes=23 * GIB)
    loaded = shipped("flux2_dev_lora", features__memory_budget="7GiB")
    with pytest.raises(HardwareError, match="does not fit"):
        planned(loaded, facts)


def test_every_decision_of_a_plan_with_waiting_blocks_has_a_reason() -> None:
    plan = planned(shipped("qwen_image_lora", features__memory_budget="12GiB"), machine("h200"))
    assert plan.swapped_blocks and plan.vae_tiling
    assert [row.feature for row in plan.decisions if not row.reason] == []


def test_without_packages_fp8_waits() -> None:
    """Stored in fp8 where nothing smaller can be had."""
    plan = planned(shipped("qwen_image_lora"), without_bitsandbytes(machine("rtx-4090")))
    assert plan.swapped_blocks > 0
    assert plan.weights in ("int8", "fp8")


def test_a_full_fine_tune_never_swaps() -> None:
    with pytest.raises(HardwareError, match=r"training needs 93\.9 GiB at least"):
        planned(shipped("flux1_dev_full"), machine("rtx-4090"))


@pytest.mark.parametrize("modulation", ["", "int8"])
@pytest.mark.parametrize("copies", [1, 2])
def test_blocks_wait_with_their_modulation(stacked: Geometry, modulation: str, copies: int) -> None:
    """Half of the 1 MiB in waiting blocks is modulation, which two FP8 copies store once."""
    half = Linears(parameters=512 * 1024, rows=512, largest=512 * 1024)
    stack = dataclasses.replace(STACK, modulation=half)
    every = dataclasses.replace(half, parameters=10 * half.parameters, rows=10 * half.rows)
    found = dataclasses.replace(stacked, stacks=(stack,), modulation=every)
    fp8 = storage(weights="fp8", compute="fp8", weight_copies=copies, modulation=modulation, swapped=1)
    scales = 4 * (1024 + 512 * bool(modulation))
    size = 512 * 1024 * (3 if modulation else 4)
    assert elsewhere_bytes(fp8, found)[0] == copies * GIB // 16 + size + scales


@pytest.mark.parametrize("weights", ["bf16", "int8", "fp8", "nf4"])
def test_what_waits_is_not_on_the_device(stacked: Geometry, weights: str) -> None:
    none = storage(weights=weights)
    four = dataclasses.replace(none, swapped=4)
    whole, largest = elsewhere_bytes(four, stacked)
    assert whole == 4 * largest > 0
    rows = [{row.name: row.bytes for row in train_rows(one, stacked)} for one in (none, four)]
    assert rows[0]["base weights"] - rows[1]["base weights"] == whole
    assert rows[1]["blocks passing through"] == 2 * largest
    assert total(host_rows(four, stacked)) - total(host_rows(none, stacked)) == whole


def test_blocks_that_wait_are_recomputed_from_outside(stacked: Geometry) -> None:
    """Recomputing from outside has counts of its own, which hold more memory."""
    compiled = stacked.activations_compiled
    outside = dataclasses.replace(compiled.recomputed, beyond=compiled.recomputed.beyond + GIB)
    geometry = dataclasses.replace(
        stacked, activations_compiled=dataclasses.replace(compiled, outside=outside)
    )
    found = []
    for swapped in (0, 4):
        one = storage(compile=True, checkpointing=True, swapped=swapped)
        found.append({row.name: row.bytes for row in train_rows(one, geometry)}["activations"])
    assert found[1] - found[0] == GIB


def test_a_copy_that_takes_longer_than_the_blocks_before_it_is_waited_for(stacked: Geometry) -> None:
    speed = roofline.Speed(rates=roofline.Rates(bf16=165, fp8=330, bandwidth=1.01), attention="flash")

    def ms(swapped: int, geometry: Geometry) -> float:
        return roofline.milliseconds(storage(swapped=swapped), geometry, speed)

    assert ms(10, stacked) == ms(0, stacked)
    short = dataclasses.replace(
        stacked, matmul_flops=1e9, attention_flops=0.0, activations=kept(0, inputs=0, block=0)
    )
    copy = elsewhere_bytes(storage(swapped=1), short)[0] / 20e9 * 1e3
    assert ms(0, short) < ms(1, short) <= ms(0, short) + 2 * copy
    assert ms(10, short) - ms(0, short) > 5 * (ms(1, short) - ms(0, short))


def test_stacks_of_a_table_are_all_blocks_the_longest_first() -> None:
    shapes = read_table(TABLES / "flux2_dev.json")["transformer"]
    part = ComponentGeometry(name="transformer", role="trained", shapes=shapes, source="table")
    found = stacks(part, families.get("flux2_dev").high_precision)
    assert [(one.name, one.blocks) for one in found] == [
        ("single_transformer_blocks", 48),
        ("transformer_blocks", 8),
    ]
    inside = sum(one.blocks * (one.quantized.parameters + one.others) for one in found)
    assert inside == sum(math.prod(shapes[name]) for name in shapes if "transformer_blocks." in name)


def test_what_stays_fp32_is_counted_in_its_block() -> None:
    shapes = {f"layers.0.{name}.weight": (4, 4) for name in ("up", "down", "modulation")}
    part = ComponentGeometry(name="transformer", role="trained", shapes=shapes, source="test")
    found = stacks(part, (r".*modulation",), (), ("modulation",))
    assert [(one.quantized.parameters, one.others, one.fp32) for one in found] == [(32, 16, 16)]


_FEW = ["to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj"]


@pytest.mark.parametrize(
    ("name", "stored", "more", "measured"),
    [
        ("flux1_dev_lora", "bf16", {}, 33.6),
        ("flux1_dev_lora", "fp8", {}, 33.9),
        ("flux2_dev_lora", "bf16", {}, 91.0),
        ("flux2_dev_lora", "bf16", {"lora__target_modules": _FEW}, 80.5),
        ("flux2_dev_lora", "bf16", {"features__activation_checkpointing": True}, 40.8),
    ],
)
def test_a_base_that_two_gpus_share_takes_what_was_measured(
    name: str, stored: str, more: dict[str, Any], measured: float
) -> None:
    """GiB that the fuller of two H200 or H100 held (docs/benchmarks/2026-11-h200x2-ranks.json, -h100x2-)."""
    features = {"weights": stored, "compute": stored, "compile": True, "activation_checkpointing": False}
    changes = {f"features__{key}": value for key, value in features.items()} | more
    loaded = shipped(name, parallel__gpus=2, parallel__shard="full", validation__prompts=[], **changes)
    plan = planned(loaded, machine("several/h200-x2"))
    every = plan.sharded_blocks
    assert plan.ranks == 2 and row(plan, "shard").value == f"{every} of {every} blocks over 2"
    assert total(plan.train_memory) / GIB == pytest.approx(measured, rel=0.03)
