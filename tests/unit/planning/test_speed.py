"""FP8, compiling, budgets that are imposed, and loading: what `auto` takes, and what is refused by name."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from tests.unit.planning.conftest import GIB, machine, with_gpu
from tests.unit.planning.test_resolve import Config, matmuls, plan, row
from trainer.errors import ConfigError, HardwareError
from trainer.machine.facts import Facts
from trainer.planning.planning import predict
from trainer.planning.shapes.geometry import Geometry, Linears


def hopper(gib: float = 80, **kernels: float | None) -> Facts:
    """An H200 of this size with these verdicts on linear layers; 95 % of it is the budget."""
    facts = with_gpu(machine("h200"), total_memory_bytes=int(gib * GIB))
    return matmuls(facts, **kernels)


def chosen(facts: Facts, geometry: Geometry, asked: Any) -> tuple[str, str, int]:
    found = plan(asked, facts, geometry)
    return found.weights, found.compute, found.weight_copies


@pytest.mark.parametrize(
    ("kernels", "expected", "why"),
    [
        ({}, ("bf16", "bf16", 1), "FP8: not measured here (`trainer probe CONFIG`)"),
        (
            {"bf16": 2.0, "fp8": 1.0},
            ("fp8", "fp8", 2),
            "measured at m4608 n9216 k3072: 1.00 ms, bf16 2.00 ms",
        ),
        ({"bf16": 1.0, "fp8": 2.0}, ("bf16", "bf16", 1), "FP8: measured at m4608 n9216 k3072: 2.00 ms"),
        ({"bf16": 2.0, "fp8": None}, ("bf16", "bf16", 1), "FP8: crashed with SIGABRT"),
        ({"fp8": 1.0}, ("bf16", "bf16", 1), "FP8: not measured here"),
    ],
)
def test_with_room_fp8_has_to_be_measured_faster(
    config: Config,
    geometry: Geometry,
    kernels: dict[str, float | None],
    expected: tuple[str, str, int],
    why: str,
) -> None:
    facts = hopper(**kernels)
    assert chosen(facts, geometry, config()) == expected
    assert row(plan(config(), facts, geometry), "compute").reason.startswith(why)


def test_a_short_run_of_many_small_layers_stays_in_bf16_and_says_why(
    config: Config, geometry: Geometry
) -> None:
    """Eager blocks wait for the host, whatever the product itself would gain."""
    many = dataclasses.replace(geometry, products=700, lora_layers=480)
    asked = config(features__compile=False)
    facts = hopper(bf16=2.0, fp8=1.0)
    found = plan(asked, facts, many)
    assert (found.weights, found.compute) == ("bf16", "bf16")
    assert "wait for the host" in row(found, "compute").reason
    assert chosen(facts, many, config(features__compile=True)) == ("fp8", "fp8", 2)


def test_without_room_fp8_comes_before_int8_unless_it_fails(config: Config, geometry: Geometry) -> None:
    assert chosen(hopper(5.8), geometry, config()) == ("fp8", "fp8", 1)
    assert row(plan(config(), hopper(5.8), geometry), "compute").reason == "no bf16 base fits the budget"
    assert chosen(hopper(5.8, fp8=None), geometry, config()) == ("int8", "bf16", 1)
    assert chosen(hopper(5.8, bf16=1.0, fp8=2.0), geometry, config()) == ("fp8", "fp8", 1)


def test_modulation_takes_half_its_bytes_before_fp8_products_are_given_up(
    config: Config, geometry: Geometry
) -> None:
    """1 GiB in FP8 and 2 in bf16, of which 1.5 are modulation."""
    mod = Linears(parameters=3 * GIB // 4, rows=1000, largest=0)
    found = dataclasses.replace(geometry, modulation=mod)

    def at(gib: float, **changes: Any) -> tuple[str, str, str]:
        kernels = {"bf16": 2.0, "fp8": 1.0, "int8": 2.2} | changes.pop("kernels", {})
        one = plan(config(**changes), hopper(gib, **kernels), found)
        return one.weights, one.compute, one.modulation

    assert at(5.8) == ("fp8", "fp8", "")
    assert at(5.2) == at(5.2, features__weights="fp8") == ("fp8", "fp8", "int8")
    assert at(5.2, features__compute="bf16") == ("int8", "bf16", "")
    assert at(5.2, kernels={"fp8": None}) == ("int8", "bf16", "")
    # not where whole int8 is faster
    assert at(5.2, kernels={"bf16": 1.0, "fp8": 2.0, "int8": 1.1}) == ("int8", "bf16", "")
    # what was written, or decided when the run began, stays
    asked = {"features__weights": "fp8", "features__modulation": "int8"}
    assert at(5.8, **asked) == at(80.0, **asked) == ("fp8", "fp8", "int8")
    with pytest.raises(HardwareError, match=r"needs 5.0 GiB at least \(weights in fp8, "):
        at(5.2, features__weights="fp8", features__modulation="kept", features__block_swap=0)
    with pytest.raises(HardwareError, match=r"features\.modulation: this model has none"):
        plan(config(**asked), hopper(80.0), geometry)
    told = plan(config(), hopper(5.2), found)
    assert row(told, "modulation").value == "int8"
    reason = row(told, "weights").reason
    assert "fp8 needs 5.0 GiB at least" in reason
    assert reason.endswith("; with modulation in int8 fp8 fits: 4.3 GiB")
    assert row(told, "modulation").reason.endswith("with modulation in bf16 the run needs 5.0 GiB at least")
    detail = next(part.detail for part in told.train_memory if part.name == "base weights")
    assert detail.startswith("1.1 B parameters in fp8, 805.3 M parameters in int8, ")
    # without the library that packs it there is none
    facts = dataclasses.replace(hopper(5.2), packages={})
    with pytest.raises(HardwareError, match=r"needs 5.0 GiB at least \(weights in fp8"):
        plan(config(), facts, found)


def test_products_in_bf16_have_the_reason_that_settled_them(config: Config, geometry: Geometry) -> None:
    """FP8's time is none where the user settled it."""

    def reason(**changes: Any) -> str:
        return row(plan(config(**changes), hopper(80.0, bf16=2.0, fp8=1.0), geometry), "compute").reason

    assert reason().startswith("measured at ")
    assert reason(features__weights="bf16") == "follows from features.weights: bf16"
    assert reason(lora__type="dora") == "follows from lora.type: dora"


def test_bf16_that_fits_with_everything_recomputed_comes_before_fp8_that_was_not_measured(
    config: Config, geometry: Geometry
) -> None:
    found = plan(config(), hopper(6.4), geometry)
    assert (found.weights, found.activation_checkpointing) == ("bf16", True)


@pytest.mark.parametrize("name", ["a100-80gb", "cpu"])
def test_profiles_without_fp8_never_take_it_alone(config: Config, geometry: Geometry, name: str) -> None:
    facts = matmuls(machine(name), bf16=2.0, fp8=1.0)
    assert plan(config(), facts, geometry).compute in ("bf16", "fp32")


def test_a_full_fine_tune_has_no_fp8_by_itself(config: Config, geometry: Geometry) -> None:
    facts = hopper(bf16=2.0, fp8=1.0)
    assert plan(config(method="full"), facts, geometry).compute == "bf16"
    with pytest.raises(ConfigError, match=r"`features\.weights: fp8` cannot be trained by `method: full`"):
        predict(config(method="full", features__weights="fp8"), facts)


@pytest.mark.parametrize(
    ("name", "says"),
    [("a100-80gb", "no FP8 units, which need 8.9"), ("cpu", "a CPU has no FP8 units")],
)
def test_fp8_products_are_refused_where_there_are_no_units(
    config: Config, geometry: Geometry, name: str, says: str
) -> None:
    with pytest.raises(HardwareError, match=rf"features\.compute: .*{says}"):
        plan(config(features__compute="fp8"), machine(name), geometry)


def test_fp8_weights_can_be_had_everywhere(config: Config, geometry: Geometry) -> None:
    asked = config(features__weights="fp8")
    assert chosen(hopper(), geometry, asked) == ("fp8", "fp8", 2)
    assert chosen(hopper(fp8=None), geometry, asked) == ("fp8", "bf16", 1)
    assert chosen(machine("a100-80gb"), geometry, asked) == ("fp8", "bf16", 1)
    assert chosen(machine("cpu"), geometry, asked) == ("fp8", "fp32", 1)
    unpacked = config(features__weights="fp8", features__compute="bf16")
    assert chosen(hopper(), geometry, unpacked) == ("fp8", "bf16", 1)
    assert chosen(machine("cpu"), geometry, unpacked) == ("fp8", "bf16", 1)


def test_fp8_products_that_were_asked_for(config: Config, geometry: Geometry) -> None:
    asked = config(features__compute="fp8")
    assert chosen(hopper(), geometry, asked) == ("fp8", "fp8", 2)
    assert chosen(hopper(5.8), geometry, asked) == ("fp8", "fp8", 1)
    with pytest.raises(HardwareError, match="the probe saw FP8 failing: crashed with SIGABRT"):
        plan(asked, hopper(fp8=None), geometry)
    with pytest.raises(ConfigError, match=r"but `features\.weights: int8`"):
        predict(config(features__compute="fp8", features__weights="int8"), hopper())
    with pytest.raises(HardwareError, match="the run computes in fp32"):
        plan(config(features__compute="fp8", model__dtype="fp32"), hopper(), geometry)
    with pytest.raises(ConfigError, match=r"features\.compute is bf16, but model\.dtype is fp32"):
        predict(config(features__compute="bf16", model__dtype="fp32"), hopper())


def test_bf16_products_that_were_asked_for_keep_fp8_out(config: Config, geometry: Geometry) -> None:
    facts = hopper(bf16=2.0, fp8=1.0)
    assert chosen(facts, geometry, config(features__compute="bf16")) == ("bf16", "bf16", 1)


def test_triton_has_no_fp8_below_ada(config: Config, geometry: Geometry) -> None:
    asked = config(features__weights="fp8")
    found = plan(asked, machine("a100-80gb"), geometry)
    assert not found.compile
    assert "cannot be compiled on this GPU" in row(found, "compile").reason
    with pytest.raises(HardwareError, match=r"features\.compile: blocks with fp8 weights"):
        plan(config(features__weights="fp8", features__compile=True), machine("a100-80gb"), geometry)


def test_blocks_are_compiled_where_the_run_is_long_enough(config: Config, geometry: Geometry) -> None:
    found = plan(config(train__max_train_steps=1500), hopper(), geometry)
    assert found.compile
    assert "compiling costs about 45 s" in row(found, "compile").reason
    short = plan(config(train__max_train_steps=20), hopper(), geometry)
    assert not short.compile
    assert row(short, "compile").reason.startswith("20 micro-batches would gain")
    assert plan(
        config(train__max_train_steps=20, train__gradient_accumulation_steps=100), hopper(), geometry
    ).compile


def test_what_compiling_needs(config: Config, geometry: Geometry) -> None:
    without = dataclasses.replace(hopper(), c_compiler=False)
    assert "C compiler" in row(plan(config(), without, geometry), "compile").reason
    with pytest.raises(HardwareError, match=r"features\.compile: it needs a C compiler"):
        plan(config(features__compile=True), without, geometry)
    no_triton = dataclasses.replace(hopper(), packages={})
    assert not plan(config(), no_triton, geometry).compile
    with pytest.raises(HardwareError, match=r"features\.activation_budget: .*needs triton"):
        plan(config(features__activation_budget=0.5), no_triton, geometry)


def test_a_cpu_compiles_only_when_told(config: Config, geometry: Geometry) -> None:
    assert not plan(config(), machine("cpu"), geometry).compile
    assert plan(config(features__compile=True), machine("cpu"), geometry).compile


def test_an_activation_budget_that_was_written(config: Config, geometry: Geometry) -> None:
    found = plan(config(features__activation_budget=0.3, train__max_train_steps=2), hopper(), geometry)
    assert (found.compile, found.activation_budget, found.activation_checkpointing) == (True, 0.3, False)
    spark = plan(config(features__activation_budget=0.3), machine("dgx-spark"), geometry)
    assert (spark.activation_budget, spark.activation_checkpointing) == (0.3, False)


def test_an_imposed_budget_replaces_the_profiles_share(config: Config, geometry: Geometry) -> None:
    found = plan(config(features__memory_budget="6.2GiB"), hopper(), geometry)
    assert found.budget_bytes == int(6.2 * GIB)
    assert found.peak_bytes <= found.budget_bytes
    assert found.activation_checkpointing
    assert row(found, "memory_budget").reason.startswith("imposed, of 80.0 GiB; 2% is left")
    # all of a card may be imposed, though a profile would leave a part of it
    assert plan(config(features__memory_budget="80GiB"), hopper(), geometry).budget_bytes == 80 * GIB
    with pytest.raises(HardwareError, match=r"features\.memory_budget: 81GiB is more than .* 80\.00 GiB"):
        plan(config(features__memory_budget="81GiB"), hopper(), geometry)


def test_an_imposed_budget_on_shared_memory_leaves_the_headroom(config: Config, geometry: Geometry) -> None:
    spark = machine("dgx-spark")
    busy = dataclasses.replace(spark.memory, available_bytes=34 * GIB)
    facts = dataclasses.replace(spark, memory=busy)
    assert plan(config(features__memory_budget="10GiB"), facts, geometry).budget_bytes == 10 * GIB
    with pytest.raises(HardwareError, match=r"is more than .* has to give, 10\.00 GiB"):
        plan(config(features__memory_budget="11GiB"), facts, geometry)
    full = dataclasses.replace(spark, memory=dataclasses.replace(busy, available_bytes=15 * GIB))
    with pytest.raises(
        HardwareError, match=r"0\.00 GiB \(15\.0 GiB available now, less .* headroom"
    ) as caught:
        plan(config(features__memory_budget="11GiB"), full, geometry)
    assert "write at most" not in str(caught.value)


def test_an_imposed_budget_does_not_lift_the_cap_of_shared_memory(config: Config, geometry: Geometry) -> None:
    """Beyond it the whole machine can stop answering."""
    with pytest.raises(HardwareError, match=r"96GiB is more than .* 91\.\d\d GiB") as raised:
        plan(config(features__memory_budget="96GiB"), machine("dgx-spark"), geometry)
    assert "or write at most 91." in str(raised.value)


def test_a_budget_of_all_of_a_card_takes_what_is_there(config: Config, geometry: Geometry) -> None:
    """Cards have a little less than their name says."""
    facts = machine("rtx-4090")
    found = plan(config(features__memory_budget="24GiB"), facts, geometry)
    assert found.budget_bytes == facts.gpus[0].total_memory_bytes < 24 * GIB
    reason = row(found, "memory_budget").reason
    assert reason.startswith("imposed: of the 24GiB that were written 23.99 GiB are there")
    with pytest.raises(HardwareError, match=r"24\.3GiB is more than .* 23\.\d\d GiB") as raised:
        plan(config(features__memory_budget="24.3GiB"), facts, geometry)
    assert "write at most 23.9GiB" in str(raised.value)


def test_the_nearest_fit_may_be_another_budget(config: Config, geometry: Geometry) -> None:
    """The suggested budget is no larger than needed, to a tenth of a GiB."""
    with pytest.raises(HardwareError, match=r"fits with features\.memory_budget: [0-9.]+GiB") as raised:
        plan(
            config(features__memory_budget="2GiB"),
            hopper(),
            geometry,
            geometry_of=lambda changed, dtype: geometry,
        )
    (size,) = re.findall(r"memory_budget: ([0-9.]+)GiB", str(raised.value))
    assert plan(config(features__memory_budget=f"{size}GiB"), hopper(), geometry)
    with pytest.raises(HardwareError, match="does not fit"):
        plan(config(features__memory_budget=f"{float(size) - 0.1:.1f}GiB"), hopper(), geometry)


def test_loader(config: Config, geometry: Geometry) -> None:
    fast = dataclasses.replace(hopper(), packages={**hopper().packages, "fastsafetensors": "0.5.0"})
    assert plan(config(), fast, geometry).loader == "auto"
    assert plan(config(features__loader="fastsafetensors"), fast, geometry).loader == "fastsafetensors"
    assert plan(config(features__loader="safetensors"), fast, geometry).loader == "safetensors"
    assert plan(config(), hopper(), geometry).loader == "auto"
    assert plan(config(), machine("cpu"), geometry).loader == "safetensors"
    for facts in (hopper(), machine("cpu")):
        with pytest.raises(HardwareError, match=r"features\.loader: "):
            plan(config(features__loader="fastsafetensors"), facts, geometry)


def test_the_step_is_predicted_where_the_machine_is_known(config: Config, geometry: Geometry) -> None:
    found = plan(config(), hopper(), geometry)
    assert 200 < found.step_milliseconds < 600
    assert "predicted, not measured" in row(found, "step_time").reason
    unknown = plan(config(), with_gpu(hopper(), name="NVIDIA Unheard-of"), geometry)
    assert unknown.step_milliseconds == 0.0
    assert row(unknown, "step_time").value == "unknown"
    assert unknown.compile  # what is faster does not depend on the name
    assert plan(config(), machine("cpu"), geometry).step_milliseconds == 0.0


def test_too_little_host_memory_is_warned_about(config: Config, geometry: Geometry) -> None:
    memory = dataclasses.replace(hopper().memory, available_bytes=3 * GIB)
    found = plan(config(), dataclasses.replace(hopper(), memory=memory), geometry)
    assert any("4.0 GiB of host memory, 3.0 GiB are available" in text for text in found.warnings)


def test_over_packed_rows_the_kernel_that_takes_any_row_in_one_call_comes_first(
    config: Config, geometry: Geometry
) -> None:
    """With others blocks would be compiled for each row anew, which no time of a kernel says."""
    at = geometry.attention_shape_class
    facts = machine("h200")
    times = {row.kernel: row.milliseconds for row in facts.verdicts if row.works and row.shape_class == at}
    assert times["attention.cudnn"] < times["attention.flash"]
    packed = row(plan(config(), facts, dataclasses.replace(geometry, packed=True)), "attention")
    assert packed.value == "flash" and "one call for any row" in packed.reason
    assert row(plan(config(), facts, geometry), "attention").value != "flash"
