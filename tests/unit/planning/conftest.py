"""Machines, configurations and shapes that the tests of this floor share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer.config.schema import RunConfig
from trainer.machine.facts import Facts, Gpu, facts_from_json
from trainer.planning.shapes.activations import PLAIN, Activations, Held
from trainer.planning.shapes.geometry import ComponentGeometry, Geometry, Linears
from trainer.ways.storages import Way, find

MACHINES = Path(__file__).parent.parent.parent / "golden" / "machines"
GIB = 1024**3


def machine(name: str) -> Facts:
    """A recorded machine."""
    path = MACHINES / f"{name}.json"
    return facts_from_json(path.read_text(), str(path))


def with_gpu(facts: Facts, **changes: Any) -> Facts:
    """The machine with its first GPU changed."""
    gpu: Gpu = dataclasses.replace(facts.gpus[0], **changes)
    return dataclasses.replace(facts, gpus=(gpu, *facts.gpus[1:]))


@pytest.fixture
def config() -> Callable[..., RunConfig]:
    """config(section__key=value, ...) on top of the smallest valid configuration."""

    def build(**changes: Any) -> RunConfig:
        tree: dict[str, Any] = {
            "family": "flux1_dev",
            "model": {"pretrained_model_name_or_path": "base"},
            "data": {"sets": [{"img_dir": "/data"}]},
            "output_dir": "/out",
        }
        for key, value in changes.items():
            section, _, field = key.rpartition("__")
            (tree.setdefault(section, {}) if section else tree)[field] = value
        return RunConfig.model_validate(tree)

    return build


def way_of(changes: dict[str, Any]) -> Way:
    """The way that the words among `changes` name, which they leave."""
    names = {"weights": "bf16", "compute": "", "weight_copies": 1, "modulation": ""}
    return find(*(changes.pop(name, usual) for name, usual in names.items()))


def kept(
    whole: int, *, inputs: int = GIB // 2, block: int = GIB // 2, shares: Mapping[float, int] | None = None
) -> Activations:
    """57 equal blocks that keep `whole` together, their inputs, and one of them recomputed."""

    def held(size: int, beyond: int = 0) -> Held:
        return Held(fixed=size % 57, blocks=(size // 57,) * 57, beyond=beyond)

    return Activations(
        whole=held(whole),
        recomputed=held(inputs, block),
        outside=held(inputs, block),
        shares={("", PLAIN): {share: held(size) for share, size in (shares or {}).items()}},
    )


@pytest.fixture
def geometry() -> Geometry:
    """Round figures: 4 GiB of bf16 weights, half of them may be int8; 6 GiB of activations, 1 recomputed."""

    def component(name: str, role: Any, *shape: int) -> ComponentGeometry:
        shapes = {f"{name}.weight": shape}
        return ComponentGeometry(name=name, role=role, shapes=shapes, source="test")

    return Geometry(
        components=(
            component("transformer", "trained", 2, 1024, 1024, 1024),
            component("text_encoder", "text_encoder", 1024, 1024, 1024),
            component("vae", "vae", 1024, 1024, 128),
        ),
        lora_parameters=1024 * 1024,
        quantized=Linears(parameters=GIB),
        activations=kept(6 * GIB),
        activations_compiled=kept(5 * GIB, shares={0.6: 3 * GIB, 0.2: 2 * GIB}),
        matmul_flops=59.5e12,
        attention_flops=14.9e12,
        attention_calls=57,
        blocks=57,
        text_bytes_peak=GIB // 4,
        vae_bytes_peak=2 * GIB,
        vae_bytes_peak_tiled=GIB // 2,
        attention_shape_class="b1 h24 d128 n4608",
        matmul_shape_class="m4608 n9216 k3072",
    )
