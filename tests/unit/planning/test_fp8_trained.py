"""The plan of a full fine-tune whose products are in FP8: asked for, refused, and what it needs."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.planning.conftest import GIB, machine
from tests.unit.planning.test_resolve import Config, plan, row
from trainer.errors import HardwareError
from trainer.planning.plan import Plan
from trainer.planning.shapes.geometry import Geometry

FULL = {"method": "full", "features__compute": "fp8"}


@pytest.fixture
def geometry(geometry: Geometry) -> Geometry:
    linears = dataclasses.replace(geometry.quantized, rows=4096, largest=2**24)
    return dataclasses.replace(geometry, quantized=linears)


def rows_of(found: Plan) -> dict[str, int]:
    return {part.name: part.bytes for part in found.train_memory}


def test_products_are_in_fp8_where_it_is_written(config: Config, geometry: Geometry) -> None:
    found, plain = (
        plan(config(**one), machine("h200"), geometry)
        for one in (FULL, {**FULL, "features__compute": "auto"})
    )
    assert (found.weights, found.compute, found.weight_copies) == ("bf16", "fp8", 2)
    assert found.way.trains and found.weight_gradient == "fp8"
    assert row(found, "compute").reason == "as written"
    assert (plain.weights, plain.compute, plain.weight_gradient) == ("bf16", "bf16", "")
    linears, more = geometry.quantized, rows_of(found)["fp8 weights"]
    # a byte a value, twice, and a scale in fp32 a row
    assert more == 2 * linears.parameters + 4 * linears.rows
    assert "fp8 weights" not in rows_of(plain)
    assert 0 < found.step_milliseconds < plain.step_milliseconds


def test_where_two_copies_do_not_fit_one_is_kept(config: Config, geometry: Geometry) -> None:
    both = plan(config(**FULL), machine("h200"), geometry)
    needed = sum(rows_of(both).values()) / GIB
    found = plan(
        config(
            **FULL, features__memory_budget=f"{needed - 0.1:.2f}GiB", features__activation_checkpointing=False
        ),
        machine("h200"),
        geometry,
    )
    assert (found.compute, found.weight_copies) == ("fp8", 1)
    assert rows_of(found)["fp8 transposed"] == geometry.quantized.largest


def test_the_gradient_of_weights_may_be_in_bf16(config: Config, geometry: Geometry) -> None:
    found = plan(config(**FULL, features__weight_gradient="bf16"), machine("h200"), geometry)
    assert found.weight_gradient == "bf16"
    assert row(found, "weight_gradient").reason == "as written"


@pytest.mark.parametrize("name", ["a100-80gb", "cpu"])
def test_without_fp8_units_it_is_refused(name: str, config: Config, geometry: Geometry) -> None:
    with pytest.raises(HardwareError, match=r"features\.compute: .* has no FP8 units"):
        plan(config(**FULL), machine(name), geometry)
