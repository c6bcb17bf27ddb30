"""One row makes a storage of weights, or an attention kernel, known to every floor."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.unit.house.sources import ROOT
from tests.unit.planning.conftest import GIB, machine
from tests.unit.planning.test_memory import rows, storage
from tests.unit.planning.test_resolve import Config, alone, plan, row, situated, small
from trainer.config.schema import FeaturesSection, changed
from trainer.engine.probing import probe
from trainer.errors import HardwareError
from trainer.files import codec
from trainer.machine.facts import Facts, KernelVerdict
from trainer.machine.profiles import PROFILES
from trainer.modeling.storage import layers
from trainer.modeling.storage.stored import StoredLinear
from trainer.planning.choose import encoding
from trainer.planning.plan import Plan
from trainer.planning.shapes.geometry import Geometry, Linears
from trainer.ways.kernels import KERNELS, Kernel
from trainer.ways.storages import WAYS, Way, find, frozen
from trainer.words import extras

INT4 = Way(
    name="int4",
    weights="int4",
    bits=4,
    row_bytes=4,
    encoder_bytes=8,
    unpack_traffic=(20.0, 10.0),
    package="made-up",
    module="torch",
    extra="nf4",
    least_capability=(8, 9),
    verdict="matmul.int4",
    tier=4,
)


class Int4Linear(StoredLinear):
    """A layer that computes as torch's."""


@pytest.fixture
def int4(monkeypatch: pytest.MonkeyPatch) -> Way:
    """The made-up row among the others, and its layer."""
    monkeypatch.setitem(WAYS, "int4", INT4)
    monkeypatch.setitem(WAYS, "bf16", dataclasses.replace(WAYS["bf16"], smaller=("int4",)))
    monkeypatch.setitem(layers.LAYERS, "int4", Int4Linear)
    return INT4


def card(gib: float, *packages: str) -> Facts:
    """An RTX 4090 of this size with these packages."""
    facts = machine("rtx-4090")
    gpu = dataclasses.replace(facts.gpu, total_memory_bytes=int(gib * GIB))
    return dataclasses.replace(facts, gpus=(gpu,), packages=dict.fromkeys(("triton", *packages), "1.0"))


def words(field: str) -> set[str]:
    """Words that the schema takes for a key of `features`."""
    return {*get_args(FeaturesSection.model_fields[field].annotation)}


def test_the_schemas_words_are_the_tables() -> None:
    run_types = {"fp16"}  # `model.dtype` alone asks for it
    assert words("weights") == {"auto", *(way.weights for way in WAYS.values())} - run_types
    assert words("compute") == {"auto", "bf16"} | {way.compute for way in WAYS.values()} - {""}
    assert words("modulation") == {"auto", "kept"} | {way.modulation for way in WAYS.values()} - {""}
    assert words("attention") == {"auto", *KERNELS}


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_comments_of_shipped_configurations_name_all_words(path: Path) -> None:
    lines = path.read_text().splitlines()
    for key, table in (("attention", {*KERNELS}), ("weights", {*frozen()})):
        found = [line for line in lines if line.startswith(f"  # {key}: ")]
        assert not [(key, table - named(line)) for line in found if not table <= named(line)]


def test_the_schemas_descriptions_name_all_words() -> None:
    schema = json.loads((ROOT / "train_configs/schema.json").read_text())
    fields = schema["definitions"]["FeaturesSection"]["properties"]
    assert {*frozen()} <= named(fields["weights"]["description"])
    packages = {name for name, kernel in KERNELS.items() if kernel.package}
    assert packages <= named(fields["attention"]["description"])


def named(text: str) -> set[str]:
    """The words of a text, with those that "flash_attn_2 to 4" and "flash_attn_2 (to 4)" leave out."""
    ranges = re.findall(r"(\w+_)(\d) \(?to (\d)", text)
    between = {f"{name}{n}" for name, first, last in ranges for n in range(int(first), int(last) + 1)}
    return {*re.findall(r"\w+", text)} | between


def test_every_frozen_storage_has_a_layer_and_less_bytes_than_what_trains() -> None:
    assert set(layers.LAYERS) == set(frozen()) >= {"int8", "nf4", "fp8"}
    for way in WAYS.values():
        assert find(way.weights, way.compute, way.copies, way.modulation) is way
        assert way.trains == (way.bits > 8 or way.method == "full")
        assert all(WAYS[word].bits < way.bits or way.copies for word in way.smaller)


def test_every_frozen_storage_can_be_had_where_nothing_multiplies_in_its_type() -> None:
    """Else a user who writes the storage is refused on such a machine."""
    beside = {(way.weights, way.modulation) for way in WAYS.values() if not way.trains and way.compute}
    unpacked = {(way.weights, way.modulation) for way in WAYS.values() if not way.trains and not way.compute}
    assert {weights for weights, _ in unpacked} == set(frozen())
    assert beside <= unpacked


def test_a_storage_that_is_never_unpacked_is_refused_where_nothing_multiplies_in_its_type(
    config: Config, geometry: Geometry, int4: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WAYS, "int4", dataclasses.replace(int4, compute="fp4", package=""))
    asked = changed(config(), {"features.weights": "int4"})
    told = r"features\.weights: int4 has no way without products in FP4: a CPU has no FP4 units"
    with pytest.raises(HardwareError, match=told) as caught:
        plan(asked, machine("cpu"), geometry)
    assert caught.value.problems[0].remedy == "leave features.weights out"
    told = r"int4 has no way without products in FP4: features\.compute is bf16"
    with pytest.raises(HardwareError, match=told):
        plan(changed(asked, {"features.compute": "bf16"}), machine("rtx-4090"), geometry)


def test_a_row_with_products_in_its_own_type_is_chosen_by_what_the_probe_saw_of_them(
    config: Config, geometry: Geometry, int4: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied = dataclasses.replace(int4, name="int4 multiplied", compute="int4", package="")
    unpacked = dataclasses.replace(int4, name="int4 unpacked", package="", verdict="")
    monkeypatch.delitem(WAYS, "int4")
    monkeypatch.setitem(WAYS, "int4 multiplied", multiplied)
    monkeypatch.setitem(WAYS, "int4 unpacked", unpacked)
    packed = Linears(parameters=GIB, rows=1000, largest=GIB // 8)
    sizes = dataclasses.replace(geometry, quantized=packed)

    def chosen(milliseconds: float | None) -> Plan:
        verdict = KernelVerdict(
            kernel="matmul.bf16",
            shape_class=geometry.matmul_shape_class,
            works=True,
            milliseconds=1.0,
            relative_error=None,
            reason="measured",
        )
        works = milliseconds is not None
        own = dataclasses.replace(verdict, kernel="matmul.int4", works=works, milliseconds=milliseconds)
        facts = dataclasses.replace(machine("h200"), verdicts=(verdict, own))
        return plan(changed(config(), {"features.weights": "int4"}), facts, sizes)

    fast, failing = chosen(0.4), chosen(None)
    assert (fast.way, failing.way) == (multiplied, unpacked)
    assert "int4 transposed" in {row.name for row in fast.train_memory}
    assert fast.step_milliseconds < chosen(0.8).step_milliseconds


def test_a_row_is_offered_priced_and_written_down(config: Config, geometry: Geometry, int4: Way) -> None:
    found = plan(config(), card(5.4, "made-up"), geometry)
    assert (found.weights, found.compute, found.way) == ("int4", "bf16", int4)
    assert "bf16 needs" in row(found, "weights").reason
    assert row(found, "compute").reason == "int4 weights are unpacked for each product"
    assert codec.from_json(Plan, codec.to_json(found), "plan.json") == found
    held = rows(
        storage(weights="int4"), dataclasses.replace(geometry, quantized=Linears(parameters=GIB, rows=1000))
    )
    assert held["base weights"] == GIB // 2 + 4 * 1000 + 2 * GIB
    int8 = plan(config(features__weights="int8"), machine("h200"), geometry)
    asked = changed(config(), {"features.weights": "int4"})
    h200 = machine("h200")
    packages = {**h200.packages, "made-up": "1.0"}
    slower = plan(asked, dataclasses.replace(h200, packages=packages), geometry)
    assert slower.step_milliseconds > int8.step_milliseconds
    assert slower.peak_bytes < int8.peak_bytes


def test_a_row_that_is_not_automatic_is_for_who_writes_it(
    config: Config, geometry: Geometry, int4: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = dataclasses.replace(int4, automatic=False)
    monkeypatch.setitem(WAYS, "int4", written)
    asked = changed(config(), {"features.weights": "int4"})
    assert plan(asked, card(5.4, "made-up"), geometry).way == written
    with pytest.raises(HardwareError, match="the run does not fit"):
        plan(config(), card(5.4, "made-up"), geometry)


def test_a_row_is_refused_below_its_capability_and_without_its_package(
    config: Config, geometry: Geometry, int4: Way
) -> None:
    asked = changed(config(), {"features.weights": "int4"})
    with pytest.raises(HardwareError, match=r"features\.weights: int4 needs 8\.9, this is NVIDIA A100"):
        plan(asked, dataclasses.replace(small(80), packages={"made-up": "1.0"}), geometry)
    with pytest.raises(HardwareError, match="int4 needs made-up, which is not installed") as caught:
        plan(asked, card(80), geometry)
    assert caught.value.problems[0].remedy == extras.remedy("nf4")
    with pytest.raises(HardwareError, match="int4 needs made-up"):
        plan(config(), card(4.5), geometry)


def test_what_the_probe_saw_of_a_row_counts(config: Config, geometry: Geometry, int4: Way) -> None:
    facts = card(5.4, "made-up")
    assert "matmul.int4" in probe.kernels_for(facts, "cuda", "bf16")
    assert "matmul.int4" not in probe.kernels_for(small(80), "cuda", "bf16")
    failed = KernelVerdict(
        kernel="matmul.int4",
        shape_class=geometry.matmul_shape_class,
        works=False,
        milliseconds=None,
        relative_error=None,
        reason="it crashed",
    )
    with pytest.raises(HardwareError, match="the probe saw int4 failing: it crashed"):
        plan(config(), dataclasses.replace(facts, verdicts=(failed,)), geometry)


def test_a_row_is_suggested_where_less_memory_is_needed(
    config: Config, geometry: Geometry, int4: Way
) -> None:
    asked = config(features__weights="bf16")
    with pytest.raises(HardwareError, match=r"fits with features\.weights: int4 \("):
        plan(asked, card(5.4, "made-up"), geometry, geometry_of=lambda other, dtype: geometry)


def test_a_row_is_for_text_encoders_too(geometry: Geometry, int4: Way) -> None:
    chosen, _ = encoding.text_storage(storage(), geometry, ("made-up",), 2 * GIB)
    assert chosen == "int4"


def test_the_models_layers_are_those_of_the_row(int4: Way) -> None:
    replace = layers.replacer(int4, (r"proj_out",))
    assert replace is not None
    layer = replace("to_q", torch.nn.Linear(8, 8))
    assert isinstance(layer, Int4Linear) and replace("proj_out", torch.nn.Linear(8, 8)) is None
    assert layers.count_quantized(torch.nn.Sequential(layer, torch.nn.Linear(8, 8)), "int4") == (1, 1)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A made-up attention kernel, the first of the Hopper profile's order."""
    kernel = Kernel(name="other", package="made-up", module="torch", least_capability=(9, 0), exact_only=True)
    monkeypatch.setitem(KERNELS, "other", kernel)
    hopper = dataclasses.replace(PROFILES["hopper-fp8"], attention=("other", "flash"))
    monkeypatch.setitem(PROFILES, "hopper-fp8", hopper)
    return kernel


def test_a_kernels_row_says_where_it_may_be_taken(
    config: Config, geometry: Geometry, other: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = dataclasses.replace(machine("h200"), verdicts=())
    asked = changed(config(), {"features.attention": "other"})
    profile = PROFILES["hopper-fp8"]

    def chosen(facts: Facts, **changes: Any) -> str:
        monkeypatch.setitem(KERNELS, "other", dataclasses.replace(other, **changes))
        return alone(situated(config(), facts, profile, lambda changed, dtype: geometry)).attention

    assert "attention.other" in probe.kernels_for(facts, "cuda", "bf16")
    assert (chosen(facts), chosen(facts, safe=True)) == ("flash", "other")
    with pytest.raises(HardwareError, match=r"other cannot run here: needs compute capability 9\.0"):
        plan(asked, machine("rtx-4090"), geometry)
    with pytest.raises(HardwareError, match="other cannot run here: made-up is not installed"):
        plan(asked, facts, geometry)
