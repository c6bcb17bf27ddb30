"""Attention kernels, CUDA graphs, blocks that are not compiled, and what is left of a budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.unit.planning.conftest import GIB, kept, machine, with_gpu
from tests.unit.planning.test_resolve import Config, measured, plan, row, small, small_with_nf4
from trainer.engine.probing import probe
from trainer.errors import HardwareError
from trainer.families import get
from trainer.machine.facts import Facts
from trainer.machine.profiles import PROFILES
from trainer.planning.plan import Plan
from trainer.planning.shapes.geometry import Geometry
from trainer.planning.shapes.run_shapes import run_geometry
from trainer.ways.kernels import KERNELS, NOT_INSTALLED

PACKAGES = ("flash_attn_2", "flash_attn_3", "flash_attn_4")


def without_packages(facts: Facts) -> Facts:
    """The machine where the probe found no package of flash-attn."""
    (shape_class,) = {verdict.shape_class for verdict in facts.verdicts}
    missing = with_missing(facts, shape_class)
    return dataclasses.replace(facts, verdicts=(*facts.verdicts, *missing.verdicts))


def with_missing(facts: Facts, shape_class: str) -> Facts:
    crashed = measured(facts, **dict.fromkeys(PACKAGES)).verdicts
    verdicts = (
        dataclasses.replace(verdict, shape_class=shape_class, reason=NOT_INSTALLED) for verdict in crashed
    )
    return dataclasses.replace(facts, verdicts=tuple(verdicts))


def test_profiles_try_every_kernel_that_the_probe_measures_and_models_take() -> None:
    tried = set(PROFILES["hopper-fp8"].attention)
    assert {f"attention.{name}" for name in tried} == set(probe.attention_kernels())
    assert tried | {"native"} == set(KERNELS)


@pytest.mark.parametrize("name", ["cudnn_strided", *PACKAGES])
def test_any_kernel_can_be_the_fastest(config: Config, geometry: Geometry, name: str) -> None:
    facts = measured(with_packages("h200"), **{"flash": 3.0, "cudnn": 2.0, name: 1.0})
    found = plan(config(), facts, geometry)
    assert found.attention == name
    assert f"{name} 1.00 ms, cudnn 2.00 ms, flash 3.00 ms" in row(found, "attention").reason


def test_kernels_that_may_crash_are_not_taken_unseen(config: Config, geometry: Geometry) -> None:
    found = plan(config(), measured(small(80), flash=None), geometry)
    assert found.attention == "efficient"
    assert row(found, "attention").reason == (
        "first of the profile's order; not measured here; flash: crashed with SIGABRT;"
        " cudnn, cudnn_strided: not measured here (`trainer probe CONFIG`)"
    )


def test_kernels_need_bf16_and_its_units_but_for_two(config: Config, geometry: Geometry) -> None:
    every = "flash, cudnn, cudnn_strided, flash_attn_2, flash_attn_3, flash_attn_4"
    unseen = dataclasses.replace(with_packages("h200"), verdicts=())
    fp32 = plan(config(model__dtype="fp32"), unseen, geometry)
    assert fp32.attention == "efficient"
    assert f"{every}: needs bf16, the run computes in fp32" in row(fp32, "attention").reason
    turing = plan(config(), with_gpu(small(80), capability=(7, 5)), geometry)
    assert turing.attention == "efficient"
    every = "flash, cudnn, cudnn_strided"  # of packages that are not installed nothing is said
    assert f"{every}: needs compute capability 8.0" in row(turing, "attention").reason


def test_a_missing_package_is_told_only_to_who_asks_for_it(config: Config, geometry: Geometry) -> None:
    facts = without_packages(measured(machine("h200"), flash=3.0, cudnn=None))
    reason = row(plan(config(), facts, geometry), "attention").reason
    assert "not installed" not in reason
    assert "cudnn: crashed with SIGABRT" in reason
    unseen = without_packages(measured(machine("h200"), cudnn=None))
    assert "not installed" not in row(plan(config(), unseen, geometry), "attention").reason
    with pytest.raises(HardwareError, match="flash_attn_2 cannot run here: flash-attn is not installed"):
        plan(config(features__attention="flash_attn_2"), facts, geometry)


def test_who_asks_for_a_package_that_is_missing_is_told_how_to_install_it(
    config: Config, geometry: Geometry
) -> None:
    """Also where the probe has not looked for it."""
    asked = config(features__attention="flash_attn_4")
    with pytest.raises(HardwareError, match="flash-attn-4 is not installed") as raised:
        plan(asked, machine("h200"), geometry)
    assert "pip install -c constraints.txt -e '.[flash-attn-4]'" in str(raised.value)
    assert plan(asked, with_packages("h200"), geometry).attention == "flash_attn_4"


def with_packages(name: str) -> Facts:
    """The machine with every package of attention kernels."""
    packages = {KERNELS[kernel].package: "1.0" for kernel in PACKAGES}
    facts = machine(name)
    return dataclasses.replace(facts, packages={**facts.packages, **packages})


def test_what_is_installed_now_counts_and_not_what_a_probe_found(config: Config, geometry: Geometry) -> None:
    """Who follows `install it` and starts again needs no probe, and a package may be gone since."""
    asked, times = config(features__attention="flash_attn_4"), {"flash": 3.0, "flash_attn_4": 1.0}
    before = with_missing(with_packages("h200"), "b1 h24 d128 n4608")
    found = plan(asked, before, geometry)
    assert found.attention == "flash_attn_4" and "not measured here" in row(found, "attention").reason
    gone = measured(machine("h200"), **times)
    assert plan(config(), gone, geometry).attention == "flash"
    with pytest.raises(HardwareError, match="flash-attn-4 is not installed"):
        plan(asked, gone, geometry)
    assert plan(config(), measured(with_packages("h200"), **times), geometry).attention == "flash_attn_4"


def test_the_third_flash_attn_is_for_hopper(config: Config, geometry: Geometry) -> None:
    asked = config(features__attention="flash_attn_3")
    assert plan(asked, with_packages("h200"), geometry).attention == "flash_attn_3"
    with pytest.raises(HardwareError, match=r"flash_attn_3 cannot run here: is for compute capability 9\.0"):
        plan(asked, machine("rtx-4090"), geometry)


def graphs(config: Any, facts: Facts, geometry: Geometry) -> tuple[bool, str]:
    found = plan(config, facts, geometry)
    decision = row(found, "cuda_graphs")
    assert found.cuda_graphs == (decision.value == "on")
    return found.cuda_graphs, decision.reason


def test_micro_batches_are_graphs_where_blocks_are_compiled(config: Config, geometry: Geometry) -> None:
    h200 = machine("h200")
    on, why = graphs(config(), h200, geometry)
    assert on and why == "thousands of launches become one: the host's speed does not matter"
    assert graphs(config(features__activation_budget=0.4), h200, geometry)[0]
    assert graphs(config(features__cuda_graphs=True), h200, geometry) == (True, "as written")
    assert graphs(config(features__cuda_graphs=False), h200, geometry) == (False, "as written")


def test_where_auto_makes_no_graphs(config: Config, geometry: Geometry) -> None:
    h200 = machine("h200")
    packed = dataclasses.replace(geometry, packed=True)
    recomputed = config(features__activation_checkpointing=True)
    assert graphs(config(features__compile=False), h200, geometry) == (False, "only with compiled blocks")
    assert graphs(config(train__max_train_steps=2), h200, geometry) == (False, "only with compiled blocks")
    assert graphs(config(features__compile=True), machine("cpu"), geometry) == (
        False,
        "a CPU has no CUDA graphs",
    )
    assert "packed rows differ" in graphs(config(), h200, packed)[1]
    assert graphs(recomputed, h200, geometry)[0]
    both = config(features__activation_checkpointing=True, features__cuda_graphs=True)
    assert graphs(both, h200, geometry) == (True, "as written")


def test_graphs_that_cannot_be_had_are_refused(config: Config, geometry: Geometry) -> None:
    def refusal(facts: Facts, geometry: Geometry, **changes: Any) -> str:
        with pytest.raises(HardwareError) as caught:
            plan(config(features__cuda_graphs=True, **changes), facts, geometry)
        assert caught.value.exit_code == 69
        return str(caught.value)

    uncompiled = refusal(machine("h200"), geometry, features__compile=False)
    assert "features.cuda_graphs: only with compiled blocks" in uncompiled
    assert "or write features.compile: true" in uncompiled
    # what would be refused in its turn is not advised
    with pytest.raises(HardwareError) as caught:
        plan(config(features__cuda_graphs=True, features__weights="fp8"), machine("a100-80gb"), geometry)
    assert "fp8 weights cannot be compiled" in str(caught.value)
    assert "features.compile: true" not in str(caught.value)
    assert "features.cuda_graphs: a CPU has no CUDA graphs" in refusal(
        machine("cpu"), geometry, features__compile=True
    )
    packed = refusal(machine("h200"), dataclasses.replace(geometry, packed=True))
    assert "features.cuda_graphs: a graph is of one shape" in packed
    assert "features.compile" not in packed


@pytest.mark.parametrize("family", ["llama", "flux1_dev"])
def test_geometry_says_which_family_packs_rows(config: Config, family: str) -> None:
    found = run_geometry(get(family), config(family=family), model_folder=None, dtype="bf16")
    assert found.packed == (get(family).packed_by is not None)


def test_each_gpu_gains_by_the_micro_batches_that_it_makes(config: Config, geometry: Geometry) -> None:
    """Compiling takes as long on eight as on one, and each has an eighth of the run's micro-batches."""
    facts = dataclasses.replace(machine("h200"), gpus=machine("h200").gpus * 8)
    steps = {"train__gradient_accumulation_steps": 8, "train__max_train_steps": 150}
    one, eight = (config(**steps, parallel__gpus=count) for count in (1, 8))
    sized = {"geometry_of": lambda changed, dtype: geometry}
    rows = [row(plan(asked, facts, geometry, **sized), "compile") for asked in (one, eight)]
    assert [found.value for found in rows] == ["on", "off"]
    assert rows[1].reason.startswith("1 200 micro-batches on 8 GPUs would gain ")


def test_nf4_blocks_are_compiled_like_others(config: Config, geometry: Geometry) -> None:
    facts = small_with_nf4(80)
    found = plan(config(features__weights="nf4"), facts, geometry)
    assert (found.compile, found.cuda_graphs) == (True, True)
    share = plan(config(features__weights="nf4", features__activation_budget=0.5), facts, geometry)
    assert (share.compile, share.activation_budget) == (True, 0.5)
    short = plan(config(features__weights="nf4", train__max_train_steps=2), facts, geometry)
    assert "would gain" in row(short, "compile").reason


def test_unpacked_fp8_is_no_way_out_where_compiling_was_asked_for(config: Config, geometry: Geometry) -> None:
    bare = dataclasses.replace(small(5.9), packages={"triton": "3.6.0"})
    assert plan(config(), bare, geometry).weights == "fp8"
    with pytest.raises(HardwareError, match="int8 needs optimum-quanto"):
        plan(config(features__compile=True), bare, geometry)
    with pytest.raises(HardwareError, match=r"features\.activation_budget: blocks with fp8 weights"):
        plan(config(features__weights="fp8", features__activation_budget=0.5), small(80), geometry)


def test_a_part_of_a_budget_is_left_for_what_predictions_miss(config: Config, geometry: Geometry) -> None:
    """A setting that needs 97.5 % is passed over under the card's share, but fills an imposed budget."""
    h200 = dataclasses.replace(machine("h200"), verdicts=())
    whole = plan(config(), h200, geometry)
    need = whole.peak_bytes
    share = PROFILES["hopper-fp8"].budget_share

    def kept(budget_bytes: float) -> float:
        facts = with_gpu(h200, total_memory_bytes=int(budget_bytes / share))
        found = plan(config(), facts, geometry)
        assert found.peak_bytes <= 0.97 * found.budget_bytes
        return found.activation_budget

    left = "95% of 139.8 GiB; 3% is left for what predictions miss"
    assert row(whole, "memory_budget").reason == left
    assert whole.budget_bytes == int(share * h200.gpus[0].total_memory_bytes)
    assert (kept(need / 0.965), whole.activation_budget) == (1.0, 1.0)
    assert kept(need / 0.975) < 1.0

    def imposed(share: float) -> Plan:
        return plan(config(features__memory_budget=f"{need / share / GIB:.4f}GiB"), h200, geometry)

    assert (imposed(0.975).activation_budget, imposed(0.985).activation_budget) == (1.0, 0.6)
    assert "; 2% is left for what predictions miss" in row(imposed(0.975), "memory_budget").reason


def test_graphs_keep_out_of_an_imposed_budget_that_is_nearly_full(config: Config, geometry: Geometry) -> None:
    h200 = dataclasses.replace(machine("h200"), verdicts=())
    need = sum(part.bytes for part in plan(config(), h200, geometry).train_memory) / GIB
    roomy = config(features__memory_budget=f"{need / 0.95:.4f}GiB")
    tight = config(features__memory_budget=f"{need / 0.97:.4f}GiB")
    asked = config(features__memory_budget=f"{need / 0.97:.4f}GiB", features__cuda_graphs=True)
    assert graphs(roomy, h200, geometry)[0]
    on, why = graphs(tight, h200, geometry)
    assert (on, why.startswith("97% of the budget is filled")) == (False, True)
    assert graphs(asked, h200, geometry) == (True, "as written")


def test_of_settings_that_are_as_fast_one_that_leaves_graphs_room_is_taken(
    config: Config, geometry: Geometry
) -> None:
    """Over int8 a budget repeats as much as recomputing does, by prediction."""
    h200 = dataclasses.replace(machine("h200"), verdicts=())
    # less than with an eighth of the blocks kept
    activations = kept(20 * GIB, shares={0.6: 5 * GIB // 2})
    geometry = dataclasses.replace(geometry, activations_compiled=activations)
    budgeted = plan(config(features__weights="int8", features__activation_budget=0.6), h200, geometry)
    recomputed = plan(
        config(features__weights="int8", features__activation_checkpointing=True, features__compile=True),
        h200,
        geometry,
    )
    assert budgeted.step_milliseconds == recomputed.step_milliseconds
    need = sum(part.bytes for part in budgeted.train_memory)
    assert need > sum(part.bytes for part in recomputed.train_memory)

    def chosen(share: float) -> tuple[float, bool, bool]:
        imposed = config(features__weights="int8", features__memory_budget=f"{need / share / GIB:.4f}GiB")
        found = plan(imposed, h200, geometry)
        return found.activation_budget, found.activation_checkpointing, found.cuda_graphs

    assert (chosen(0.935), chosen(0.975)) == ((0.6, False, True), (1.0, True, True))
