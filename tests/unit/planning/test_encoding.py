"""Storage of text encoders while captions are encoded: full-size models on the recorded H200."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.planning.conftest import GIB, machine
from trainer.config.reading.load import Loaded
from trainer.config.schema import RunConfig
from trainer.errors import HardwareError
from trainer.families import get
from trainer.files import codec
from trainer.planning.choose import encoding
from trainer.planning.cost import memory
from trainer.planning.cost.storage import Storage
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run
from trainer.planning.shapes.geometry import ComponentGeometry, Geometry
from trainer.planning.shapes.run_shapes import run_geometry
from trainer.ways.storages import find

Make = Callable[..., RunConfig]
PACKAGES = ("optimum-quanto", "bitsandbytes")


def storage(**changes: Any) -> Storage:
    plain = Storage(
        method="lora",
        device="cuda",
        dtype="bf16",
        way=find("nf4"),
        checkpointing=True,
        tiling=False,
        previews=False,
        attention="flash",
    )
    return dataclasses.replace(plain, **changes)


def of(config: Make, family: str, **changes: Any) -> RunConfig:
    return config(family=family, model__pretrained_model_name_or_path="owner/name", **changes)


def planned(config: RunConfig, packages: tuple[str, ...] = PACKAGES) -> Plan:
    """The plan with these packages for quantised layers."""
    facts = machine("h200")
    others = {name: version for name, version in facts.packages.items() if name not in PACKAGES}
    facts = dataclasses.replace(facts, packages=others | dict.fromkeys(packages, "1.0"))
    return plan_run(Loaded(config=config, sources={}), facts, find_model=lambda _: None)


@pytest.mark.parametrize(
    ("family", "budget", "kind"),
    [
        ("flux2_dev", 48, ""),
        ("flux2_dev", 30, "int8"),
        ("flux2_dev", 24, "nf4"),
        ("qwen_image", 24, ""),
        ("qwen_image", 16, "int8"),
        ("flux1_dev", 16, ""),
        ("flux1_dev", 8, "int8"),
        ("llama", 1, ""),
    ],
)
def test_the_most_precise_storage_that_fits_is_chosen(
    family: str, budget: int, kind: str, config: Make
) -> None:
    geometry = run_geometry(get(family), of(config, family), model_folder=None, dtype="bf16")
    chosen, _ = encoding.text_storage(storage(), geometry, PACKAGES, budget * GIB)
    assert chosen == kind
    assert encoding.needed_bytes(storage(), geometry, chosen) <= budget * GIB


def test_a_plan_says_what_more_precise_encoders_need(config: Make) -> None:
    plan = planned(of(config, "flux2_dev", features__memory_budget="26GiB"))
    assert (plan.weights, plan.text_encoder_weights) == ("nf4", "nf4")
    assert plan.peak_bytes <= plan.budget_bytes == 26 * GIB
    (row,) = [row for row in plan.decisions if row.feature == "text_encoders"]
    assert (row.value, row.source) == ("nf4", "auto")
    assert row.reason == "bf16 needs 47.9 GiB; int8 needs 27.7 GiB"
    names = [row.name for row in plan.cache_memory]
    assert names == ["text encoders", "nf4 unpacked", "text encoders: activations", "CUDA"]
    assert codec.from_json(Plan, codec.to_json(plan), "plan.json") == plan


def test_encoders_that_fit_are_not_quantised(config: Make) -> None:
    plan = planned(of(config, "flux2_dev", features__weights="nf4"))
    assert (plan.weights, plan.text_encoder_weights) == ("nf4", "bf16")
    assert "text_encoders" not in [row.feature for row in plan.decisions]


def test_a_refusal_names_the_packages_that_would_help(config: Make) -> None:
    small = of(config, "flux2_dev", features__memory_budget="26GiB", data__resolution=512)
    with pytest.raises(HardwareError) as caught:
        planned(small, ())
    assert "encoding captions and images needs 47.9 GiB at least (text encoders in bf16)" in str(caught.value)
    assert "int8 needs optimum-quanto, which is not installed" in str(caught.value)
    assert "nf4 needs bitsandbytes, which is not installed" in str(caught.value)


def test_bytes_are_those_of_layers_and_of_what_is_kept(geometry: Geometry) -> None:
    layer, table = (4096, 1024), (1000, 1024)
    shapes = {
        "shared.weight": table,
        "block.0.attention.q.weight": layer,
        "block.0.attention.q.bias": (4096,),
        "block.0.attention.relative_attention_bias.weight": (32, 64),
        "block.0.mlp.wo.weight": layer,
        "merger.mlp.0.weight": layer,
        "lm_head.weight": table,
    }
    part = ComponentGeometry(name="t", role="text_encoder", shapes=shapes, source="test")
    only = dataclasses.replace(geometry, components=(part,))
    packed, kept = 4096 * 1024, 2 * 4096 * 1024 + 2 * 1000 * 1024 + 4096 + 32 * 64

    def rows(kind: str, dtype: str = "bf16") -> dict[str, int]:
        stored = storage(text_encoders=kind, dtype=dtype)
        return {row.name: row.bytes for row in memory.text_rows(stored, only)}

    assert rows("")["text encoders"] == 2 * (packed + kept)
    assert rows("int8")["text encoders"] == packed + 4 * 4096 + 2 * kept
    scales = packed // 64
    assert rows("nf4")["text encoders"] == packed // 2 + scales + scales // 256 * 4 + 2048 + 2 * kept
    assert rows("int8")["int8 unpacked"] == 8 * packed
    assert rows("nf4")["nf4 unpacked"] == 4 * packed
    # T5 keeps its `wo` in fp32 in fp16, stored or not
    for kind in ("", "int8", "nf4"):
        assert rows(kind, "fp16")["text encoders"] == rows(kind)["text encoders"] + 2 * packed
