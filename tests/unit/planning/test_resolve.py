"""Decisions: what is written is honoured or refused, `auto` takes the first that works with reasons."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.unit.planning.conftest import GIB, kept, machine, with_gpu
from trainer.config.schema import RunConfig, changed
from trainer.errors import ConfigError, HardwareError
from trainer.machine.facts import Facts, KernelVerdict
from trainer.machine.profiles import PROFILES, Profile, select_each
from trainer.planning import torch_and_driver
from trainer.planning.choose.situation import GeometryOf, Situation
from trainer.planning.decided import decide, plan_of
from trainer.planning.plan import Decision, Plan
from trainer.planning.planning import predict
from trainer.planning.resolve import resolve
from trainer.planning.shapes.geometry import Geometry

Config = Callable[..., RunConfig]


def small(gib: float) -> Facts:
    """A generic GPU of this size: 93 % is the budget, filled to 97 %. bitsandbytes is not installed."""
    facts = with_gpu(machine("a100-80gb"), total_memory_bytes=int(gib * GIB))
    packages = {name: version for name, version in facts.packages.items() if name != "bitsandbytes"}
    return dataclasses.replace(facts, packages=packages)


def plan(
    config: RunConfig, facts: Facts, geometry: Geometry, *, geometry_of: GeometryOf | None = None
) -> Plan:
    """The plan of a run of this geometry; with `geometry_of`, which sizes others, of smaller batches too."""
    machines = on_each_kind(config, facts, geometry_of or (lambda changed, dtype: geometry))
    if geometry_of is None:
        return alone(machines[0][0])
    return resolve(machines, functools.partial(changed, config), offload=True)


def on_each_kind(
    config: RunConfig, facts: Facts, sized: GeometryOf, environ: Mapping[str, str] | None = None
) -> list[tuple[Situation, Decision]]:
    """A run on each kind of GPU of a machine, with the row of its profile, as planning makes them."""
    machines = []
    for kind in select_each(facts):
        one = situated(config, kind.facts, kind.profile, sized)
        others = facts.besides(kind.places) if kind.places else ()
        one = dataclasses.replace(one, environ=environ or {}, devices=kind.places, others=others)
        machines.append((one, Decision("profile", kind.profile.name, "facts", "")))
    return machines


def alone(situation: Situation) -> Plan:
    """The plan of a configuration as it is, with no look at others."""
    rows = torch_and_driver.check(situation.facts, situation.profile)
    return plan_of(decide(situation, swap=True), rows, None)


def situated(config: RunConfig, facts: Facts, profile: Profile, sized: GeometryOf) -> Situation:
    """A run of which two keys were written somewhere."""
    sources = {"features.weights": "my.yaml:7", "features.attention": "--set features.attention"}
    return Situation(config=config, facts=facts, profile=profile, sources=sources, environ={}, sized=sized)


def row(found: Plan, feature: str) -> Decision:
    return next(decision for decision in found.decisions if decision.feature == feature)


# compiled, the test geometry needs about 10.0 GiB in bf16, 5.9 with all blocks recomputed, and 5.0 so in int8
@pytest.mark.parametrize(
    ("gib", "weights", "recomputed", "share"),
    [
        (80, "bf16", 0, 1.0),
        (10.3, "bf16", 0, 0.6),
        (7.75, "bf16", 43, 1.0),
        (6.7, "bf16", 50, 1.0),
        (6.45, "int8", 43, 1.0),
        (5.9, "int8", 50, 1.0),
    ],
)
def test_auto_takes_the_fastest_that_fits(
    config: Config, geometry: Geometry, gib: float, weights: str, recomputed: int, share: float
) -> None:
    found = plan(config(), small(gib), geometry)
    assert found.compile
    assert (found.weights, found.recomputed_blocks) == (weights, recomputed)
    assert (found.activation_checkpointing, found.activation_budget) == (recomputed > 0, share)
    assert found.peak_bytes <= 0.97 * found.budget_bytes


def test_without_compiled_blocks_there_is_checkpointing_only(config: Config, geometry: Geometry) -> None:
    found = plan(config(features__compile=False), small(8), geometry)
    assert (found.compile, found.activation_checkpointing, found.activation_budget) == (False, True, 1.0)
    assert "activation_budget" not in {decision.feature for decision in found.decisions}


def test_what_was_skipped_is_said(config: Config, geometry: Geometry) -> None:
    found = plan(config(), small(6.45), geometry)
    assert row(found, "weights").reason == "bf16 needs 5.9 GiB at least"
    recomputing = row(found, "activation_checkpointing")
    assert recomputing.value == "43 of 57 blocks"
    assert recomputing.reason == "keeping 100% needs 9.1 GiB; recomputing 36 blocks needs 6.2 GiB"
    shares = row(plan(config(), small(10.3), geometry), "activation_budget")
    assert (shares.value, shares.reason) == ("0.6", "keeping 100% needs 9.9 GiB")


def test_a_number_of_recomputed_blocks_is_taken_as_written(config: Config, geometry: Geometry) -> None:
    found = plan(config(features__activation_checkpointing=20), small(80), geometry)
    assert (found.activation_checkpointing, found.recomputed_blocks) == (True, 20)
    assert row(found, "activation_checkpointing").value == "20 of 57 blocks"
    all_of_them = plan(config(features__activation_checkpointing=57), small(80), geometry)
    assert (all_of_them.activation_checkpointing, all_of_them.recomputed_blocks) == (True, 0)
    with pytest.raises(HardwareError, match="58 blocks are to be recomputed, the model has 57"):
        plan(config(features__activation_checkpointing=58), small(80), geometry)


def test_nothing_fits(config: Config, geometry: Geometry) -> None:
    with pytest.raises(HardwareError) as caught:
        plan(config(), small(4), geometry)
    assert caught.value.exit_code == 69
    assert "training needs" in str(caught.value)
    assert "budget is 3.6 GiB (93% of 4.0 GiB; 3% is left for what predictions miss)" in str(caught.value)


def test_an_explicit_choice_that_does_not_fit_is_not_changed(config: Config, geometry: Geometry) -> None:
    asked = config(features__weights="bf16")
    with pytest.raises(HardwareError) as caught:
        plan(asked, small(5.9), geometry, geometry_of=lambda changed, dtype: geometry)
    assert "features.weights is bf16 (my.yaml:7)" in str(caught.value)
    assert "or features.weights: int8 (" in str(caught.value)


@pytest.fixture
def scaled(geometry: Geometry) -> Callable[[RunConfig, str], Geometry]:
    """The geometry with activations that grow with batch size and area."""

    def geometry_of(changed: RunConfig, dtype: str) -> Geometry:
        scale = changed.train.train_batch_size * changed.data.resolution**2 / 1024**2
        held = kept(int(6 * GIB * scale), inputs=int(GIB * scale), block=0)
        return dataclasses.replace(geometry, activations=held, activations_compiled=held)

    return geometry_of


def test_a_batch_that_does_not_fit_is_split(
    config: Config, scaled: Callable[[RunConfig, str], Geometry]
) -> None:
    big = config(train__train_batch_size=6, train__gradient_accumulation_steps=2)

    def split(gib: float) -> tuple[int, int]:
        found = plan(big, small(gib), scaled(big, "bf16"), geometry_of=scaled)
        assert found.peak_bytes <= found.budget_bytes
        return found.micro_batch_size, found.accumulation_steps

    assert [split(gib) for gib in (80, 9, 7, 6)] == [(6, 2), (3, 4), (1, 12), (1, 12)]
    found = plan(big, small(9), scaled(big, "bf16"), geometry_of=scaled)
    assert row(found, "micro_batch").value == "3 x 4"
    assert "6 samples at once do not fit; a step still has 12" in row(found, "micro_batch").reason
    assert "micro_batch" not in {one.feature for one in plan(big, small(80), scaled(big, "bf16")).decisions}


def test_a_batch_that_fits_only_in_a_coarser_base_is_split(
    config: Config, scaled: Callable[[RunConfig, str], Geometry]
) -> None:
    big = config(train__train_batch_size=6, train__gradient_accumulation_steps=2)
    facts = small_with_nf4(11)
    coarse = plan(big, facts, scaled(big, "bf16"))
    assert coarse.weights != "bf16"
    found = plan(big, facts, scaled(big, "bf16"), geometry_of=scaled)
    assert (found.weights, found.micro_batch_size * found.accumulation_steps) == ("bf16", 12)
    assert found.micro_batch_size < 6
    assert f"6 samples at once fit only in {coarse.weights}" in row(found, "micro_batch").reason


def test_a_full_fine_tune_is_not_split_for_speed(
    config: Config, scaled: Callable[[RunConfig, str], Geometry]
) -> None:
    """The gradients of a full fine-tune are summed in bf16, which rounds at every further micro-batch."""
    big = config(method="full", train__train_batch_size=6, train__gradient_accumulation_steps=2)
    for gib in (31, 40, 60):
        found = plan(big, small(gib), scaled(big, "bf16"), geometry_of=scaled)
        alone = plan(big, small(gib), scaled(big, "bf16"))
        assert found.micro_batch_size == alone.micro_batch_size == 6


def test_the_nearest_fit_is_found_among_resolutions(
    config: Config, scaled: Callable[[RunConfig, str], Geometry]
) -> None:
    wide = config(train__train_batch_size=2, data__resolution=4096)
    with pytest.raises(HardwareError, match=r"fits with data\.resolution: 1024 \("):
        plan(wide, small(6.2), scaled(wide, "bf16"), geometry_of=scaled)
    with pytest.raises(HardwareError, match="use a machine with more memory"):
        plan(wide, small(3), scaled(wide, "bf16"), geometry_of=scaled)


def test_tiling_is_taken_before_anything_slower(config: Config, geometry: Geometry) -> None:
    heavy = dataclasses.replace(geometry, vae_bytes_peak=90 * GIB)
    found = plan(config(), small(80), heavy)
    assert found.vae_tiling and not found.activation_checkpointing and found.weights == "bf16"
    assert row(found, "vae_tiling").reason.startswith("with whole images the run needs ")
    with pytest.raises(HardwareError, match="encoding captions and images"):
        plan(config(features__vae_tiling=False), small(80), heavy)


def test_int8_needs_quanto_and_lora(config: Config, geometry: Geometry) -> None:
    without = dataclasses.replace(small(5.9), packages={})
    found = plan(config(), without, geometry)
    assert (found.weights, found.compute) == ("fp8", "bf16")  # torch alone can do that
    with pytest.raises(HardwareError, match="int8 needs optimum-quanto, which is not installed"):
        plan(config(), dataclasses.replace(small(4.5), packages={}), geometry)
    with pytest.raises(HardwareError, match=r"my\.yaml:7: features\.weights: int8 needs optimum-quanto"):
        plan(config(features__weights="int8"), without, geometry)
    with pytest.raises(ConfigError, match=r"features\.weights: .*cannot be trained"):
        predict(config(method="full", features__weights="int8"), small(80))


def small_with_nf4(gib: float) -> Facts:
    return with_bitsandbytes(small(gib))


def with_bitsandbytes(facts: Facts) -> Facts:
    return dataclasses.replace(facts, packages={**facts.packages, "bitsandbytes": "0.50.2"})


def test_nf4_is_the_last_that_auto_takes(config: Config, geometry: Geometry) -> None:
    # about 4.5 GiB; the VAE untiled needs more than that in caching
    found = plan(config(), with_bitsandbytes(small(5)), geometry)
    assert (found.weights, found.activation_checkpointing) == ("nf4", True)
    assert row(found, "weights").reason == "bf16 needs 5.9 GiB at least; int8 needs 5.0 GiB at least"
    assert found.peak_bytes <= found.budget_bytes
    assert plan(config(), with_bitsandbytes(small(5.9)), geometry).weights == "int8"
    with pytest.raises(HardwareError, match="nf4 needs bitsandbytes, which is not installed"):
        plan(config(), small(5), geometry)


def test_a_storage_that_the_probe_saw_failing_is_left_out(config: Config, geometry: Geometry) -> None:
    facts = with_bitsandbytes(small(5.9))
    assert plan(config(), matmuls(facts, int8=None), geometry).weights == "fp8"
    with pytest.raises(HardwareError, match="the probe saw nf4 failing: crashed with SIGABRT"):
        plan(config(), matmuls(small_with_nf4(4.5), nf4=None), geometry)


def test_nf4_needs_bitsandbytes_and_lora(config: Config, geometry: Geometry) -> None:
    asked = config(features__weights="nf4")
    with pytest.raises(
        HardwareError, match=r"my\.yaml:7: features\.weights: nf4 needs bitsandbytes"
    ) as caught:
        plan(asked, small(80), geometry)
    assert "pip install -c constraints.txt -e '.[nf4]'" in str(caught.value)
    assert plan(asked, with_bitsandbytes(small(80)), geometry).weights == "nf4"
    with pytest.raises(ConfigError, match=r"`features\.weights: nf4` cannot be trained by `method: full`"):
        predict(config(method="full", features__weights="nf4"), with_bitsandbytes(small(80)))


def test_nf4_is_suggested_where_it_can_be_had(config: Config, geometry: Geometry) -> None:
    def told(facts: Facts, **changes: Any) -> str:
        with pytest.raises(HardwareError) as caught:
            plan(config(**changes), facts, geometry, geometry_of=lambda changed, dtype: geometry)
        return str(caught.value)

    tight = small(5)
    for asked in ("bf16", "int8", "fp8"):
        assert "fits with features.weights: nf4" in told(with_bitsandbytes(tight), features__weights=asked)
    # what is refused alone does not spoil the sums of other changes
    both = {"features__weights": "bf16", "features__activation_checkpointing": False}
    assert "activation_checkpointing: true and features.weights: fp8" in told(small(5.9), **both)


def test_a_checkpoint_in_nf4_decides_the_storage(config: Config, geometry: Geometry) -> None:
    stored = dataclasses.replace(geometry, stored_as="nf4", stored_bytes=GIB)
    big = with_bitsandbytes(small(80))
    found = plan(config(), big, stored)
    assert found.weights == "nf4"
    assert row(found, "weights").reason == "the checkpoint is stored so"
    assert plan(config(features__weights="nf4"), big, stored).weights == "nf4"
    with pytest.raises(HardwareError, match=r"my\.yaml:7: .*base/transformer/config\.json says .* in int8"):
        plan(config(features__weights="int8"), big, stored)
    with pytest.raises(HardwareError, match=r"base/transformer/config\.json .*cannot be trained"):
        plan(config(method="full"), big, stored)
    with pytest.raises(HardwareError, match="nf4 needs bitsandbytes"):
        plan(config(), small(80), stored)


def test_shared_memory_is_filled_as_any_other(config: Config, geometry: Geometry) -> None:
    """The budget itself keeps shared memory safe; recomputing within it would only cost time."""
    spark = machine("dgx-spark")
    assert not plan(config(), spark, geometry).activation_checkpointing
    busy = dataclasses.replace(spark.memory, available_bytes=31 * GIB)
    assert plan(config(), dataclasses.replace(spark, memory=busy), geometry).activation_checkpointing


def test_spark_keeps_20_gib_of_what_is_available(config: Config, geometry: Geometry) -> None:
    """The process's own host memory comes out of the same memory."""
    spark = machine("dgx-spark")
    busy = dataclasses.replace(spark.memory, available_bytes=34 * GIB)
    found = plan(config(), dataclasses.replace(spark, memory=busy), geometry)
    assert found.budget_bytes == 34 * GIB - 20 * GIB - sum(row.bytes for row in found.host_memory)
    assert plan(config(), spark, geometry).budget_bytes == int(0.75 * spark.gpus[0].total_memory_bytes)


def test_dtype(config: Config, geometry: Geometry) -> None:
    turing = with_gpu(machine("a100-80gb"), capability=(7, 5))
    generic = PROFILES["generic-cuda"]

    def dtype_of(config: RunConfig, facts: Facts, profile: Profile) -> str:
        return situated(config, facts, profile, lambda changed, dtype: geometry).dtype

    assert dtype_of(config(), turing, generic) == "fp32"
    assert dtype_of(config(), machine("a100-80gb"), generic) == "bf16"
    assert dtype_of(config(), machine("cpu"), PROFILES["cpu"]) == "fp32"
    assert dtype_of(config(features__weights="fp32"), machine("a100-80gb"), generic) == "fp32"
    with pytest.raises(HardwareError, match=r"model\.dtype: .*has no bf16, which needs 8\.0"):
        dtype_of(config(model__dtype="bf16"), turing, generic)
    with pytest.raises(ConfigError, match=r"features\.weights: fp32` contradicts `model\.dtype: bf16"):
        predict(config(features__weights="fp32", model__dtype="bf16"), machine("a100-80gb"))


def test_tf32(config: Config, geometry: Geometry) -> None:
    assert plan(config(), small(80), geometry).tf32
    assert not plan(config(features__tf32=False), small(80), geometry).tf32
    with pytest.raises(HardwareError, match=r"features\.tf32"):
        plan(config(features__tf32=True), machine("cpu"), geometry)


def measured(facts: Facts, **kernels: float | None) -> Facts:
    """Verdicts on attention by kernel: milliseconds, or None for a crash."""
    return with_verdicts(facts, "attention", "b1 h24 d128 n4608", kernels)


def matmuls(facts: Facts, **kernels: float | None) -> Facts:
    """The same for frozen linear layers."""
    return with_verdicts(facts, "matmul", "m4608 n9216 k3072", kernels)


def with_verdicts(facts: Facts, what: str, shape_class: str, kernels: dict[str, float | None]) -> Facts:
    verdicts = tuple(
        KernelVerdict(
            kernel=f"{what}.{name}",
            shape_class=shape_class,
            works=ms is not None,
            milliseconds=ms,
            relative_error=None,
            reason="ok" if ms is not None else "crashed with SIGABRT",
        )
        for name, ms in kernels.items()
    )
    return dataclasses.replace(facts, verdicts=verdicts)


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ({}, "flash"),
        ({"flash": 9.0, "cudnn": 4.5, "efficient": 12.0}, "cudnn"),
        ({"flash": 9.0, "cudnn": None}, "flash"),
        ({"flash": None, "cudnn": None}, "efficient"),
        ({"flash": None}, "efficient"),
        ({"flash": None, "cudnn": None, "efficient": None}, "math"),
    ],
)
def test_attention_is_the_fastest_that_works(
    config: Config, geometry: Geometry, kernels: dict[str, float | None], expected: str
) -> None:
    assert plan(config(), measured(small(80), **kernels), geometry).attention == expected


def test_verdicts_of_another_shape_do_not_count(config: Config, geometry: Geometry) -> None:
    other = dataclasses.replace(geometry, attention_shape_class="b1 h24 d128 n1024")
    assert plan(config(), measured(small(80), flash=9.0, cudnn=4.5), other).attention == "flash"


def test_attention_that_was_asked_for(config: Config, geometry: Geometry) -> None:
    assert plan(config(features__attention="cudnn"), small(80), geometry).attention == "cudnn"
    with pytest.raises(HardwareError, match=r"--set features\.attention: .*crashed with SIGABRT"):
        plan(config(features__attention="cudnn"), measured(small(80), cudnn=None), geometry)
    with pytest.raises(HardwareError, match="a CPU has native and math only"):
        plan(config(features__attention="flash"), machine("cpu"), geometry)
    with pytest.raises(HardwareError, match="flash cannot run here: needs bf16"):
        plan(config(features__attention="flash", model__dtype="fp32"), small(80), geometry)


def test_attention_without_bf16_units(config: Config, geometry: Geometry) -> None:
    turing = with_gpu(small(80), capability=(7, 5))
    found = plan(config(), turing, geometry)
    assert found.attention == "efficient"
    assert plan(config(model__dtype="fp32"), small(80), geometry).attention == "efficient"
    assert plan(config(), machine("cpu"), geometry).attention == "native"


def test_disk_counts_what_is_saved(config: Config, geometry: Geometry) -> None:
    def disk(**changes: Any) -> int:
        return plan(config(**changes), small(80), geometry).disk_bytes

    per_checkpoint, files = 12 * geometry.lora_parameters, 4 * geometry.lora_parameters
    assert disk(train__max_train_steps=1500) == 4 * per_checkpoint + files
    assert disk(train__max_train_steps=500) == 2 * per_checkpoint + files
    assert disk(train__max_train_steps=20) == per_checkpoint + files  # the last step


def test_warnings(config: Config, geometry: Geometry) -> None:
    facts = dataclasses.replace(small(80), wsl=True, gpus=(*small(80).gpus, *machine("h200").gpus))
    text = " ".join(plan(config(), facts, geometry).warnings)
    assert "WSL" in text
    assert plan(config(), small(80), geometry).warnings == ()
