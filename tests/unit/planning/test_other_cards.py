"""GPUs that no profile is named after: FP8 goes by what they can do and what was measured, not by a name."""

from __future__ import annotations

import pytest

from tests.unit.planning.conftest import GIB, machine, with_gpu
from tests.unit.planning.test_resolve import matmuls
from tests.unit.planning.test_swapping import planned, row, shipped
from trainer.errors import HardwareError
from trainer.machine.facts import Facts
from trainer.planning.plan import Plan


def card(name: str, capability: tuple[int, int], gib: float, **milliseconds: float | None) -> Facts:
    """A GeForce of another size, with times of products at the shape of FLUX.1's largest layer."""
    size = int(gib * GIB)
    facts = with_gpu(machine("rtx-4090"), name=name, capability=capability, total_memory_bytes=size)
    return matmuls(facts, **milliseconds)


def rtx_5090(**milliseconds: float | None) -> Facts:
    return card("NVIDIA GeForce RTX 5090", (12, 0), 31.4, **milliseconds)


def flux(facts: Facts) -> Plan:
    plan = planned(shipped("flux1_dev_lora"), facts)
    assert plan.profile == "generic-cuda"
    return plan


def test_a_card_multiplies_in_fp8_where_that_was_measured_faster() -> None:
    plan, older = flux(rtx_5090(bf16=2.0, fp8=1.1)), planned(shipped("flux1_dev_lora"), machine("rtx-4090"))
    assert (plan.weights, plan.compute) == ("fp8", "fp8")
    assert "measured at" in row(plan, "compute").reason
    assert 0 < plan.step_milliseconds < older.step_milliseconds


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (rtx_5090(), "FP8: not measured here (`trainer probe CONFIG`)"),
        (rtx_5090(bf16=1.0, fp8=1.1), "FP8: measured at m4608 n9216 k3072: 1.10 ms, bf16 1.00 ms"),
        (rtx_5090(bf16=1.0, fp8=None), "FP8: crashed with SIGABRT"),
        (machine("a100-80gb"), "FP8: NVIDIA A100-SXM4-80GB (compute capability 8.0) has no FP8 units"),
    ],
)
def test_a_card_says_why_it_multiplies_in_bf16(facts: Facts, reason: str) -> None:
    plan = flux(facts)
    assert (plan.weights, plan.compute) == ("bf16", "bf16")
    assert row(plan, "compute").reason.startswith(reason)


@pytest.mark.parametrize(
    ("times", "skipped"), [({}, "bf16 needs"), ({"bf16": 2.0, "fp8": 1.1}, "fp8 kept twice needs")]
)
def test_fp8_comes_before_int8_where_bf16_does_not_fit(times: dict[str, float | None], skipped: str) -> None:
    plan = flux(card("NVIDIA RTX 4500 Ada Generation", (8, 9), 20.0, **times))
    assert (plan.weights, plan.compute) == ("fp8", "fp8")
    assert skipped in row(plan, "weights").reason


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4080", "NVIDIA GeForce RTX 4060 Ti"])
def test_on_16_gib_nothing_finer_fits_with_every_block_on_the_gpu(name: str) -> None:
    """Of a card whose peaks are known, and of one whose are not."""
    facts = card(name, (8, 9), 15.99, bf16=2.0, fp8=1.1)
    chosen, finer = flux(facts), ["bf16", "fp8", "int8", "nf4"]
    assert chosen.swapped_blocks == 0
    for weights in finer[: finer.index(chosen.weights)]:
        config = shipped("flux1_dev_lora", features__weights=weights, features__block_swap=0)
        with pytest.raises(HardwareError, match="does not fit"):
            planned(config, facts)
