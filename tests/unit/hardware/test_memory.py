"""Predicted memory against what was measured on an H200, and the arithmetic of each row."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.hardware.conftest import GIB
from trainer.config.schema import RunConfig
from trainer.engine.geometry import run_geometry
from trainer.families import get
from trainer.hardware import memory
from trainer.hardware.geometry import Geometry
from trainer.hardware.memory import Storage


def storage(**changes: object) -> Storage:
    values: dict[str, object] = {
        "method": "lora",
        "device": "cuda",
        "dtype": "bf16",
        "weights": "bf16",
        "checkpointing": False,
        "tiling": False,
        "previews": False,
        "random_weights": False,
    }
    return Storage(**{**values, **changes})  # type: ignore[arg-type]


def rows(chosen: Storage, geometry: Geometry) -> dict[str, int]:
    return {row.name: row.bytes for row in memory.train_rows(chosen, geometry)}


# FLUX.1-dev, random weights, LoRA rank 16 on attention, 1024 px, batch 1, on one H200 (docs/benchmarks.md):
# the allocator's peak in GiB, so the row of the CUDA context is left out here
@pytest.mark.parametrize(
    ("weights", "checkpointing", "measured"),
    [("bf16", True, 24.7), ("bf16", False, 46.9), ("int8", True, 22.3)],
)
def test_prediction_is_within_15_percent_of_the_h200(
    weights: str, checkpointing: bool, measured: float
) -> None:
    config = RunConfig.model_validate(
        {
            "family": "flux1_dev",
            "model": {"pretrained_model_name_or_path": "x/y", "weights": "random"},
            "data": {"sets": [{"img_dir": "/data"}]},
            "output_dir": "/out",
        }
    )
    geometry = run_geometry(get("flux1_dev"), config, model_folder=None, dtype="bf16")
    predicted = rows(storage(weights=weights, checkpointing=checkpointing, random_weights=True), geometry)
    allocated = sum(size for name, size in predicted.items() if name != "CUDA") / GIB
    assert allocated == pytest.approx(measured, rel=0.15)
    assert sum(predicted.values()) / GIB == pytest.approx(measured, rel=0.15)


def test_lora_state_on_bf16(geometry: Geometry) -> None:
    count = geometry.lora_parameters
    found = rows(storage(), geometry)
    assert found["base weights"] == 4 * GIB
    assert found["adapter"] == (2 + 4) * count
    assert found["gradients"] == (2 + 4) * count
    assert found["optimizer state"] == 8 * count
    assert found["activations"] == 6 * GIB


def test_lora_state_on_fp32(geometry: Geometry) -> None:
    count = geometry.lora_parameters
    found = rows(storage(dtype="fp32", weights="fp32", device="cpu"), geometry)
    assert found["base weights"] == 8 * GIB
    assert (found["adapter"], found["gradients"], found["optimizer state"]) == (
        4 * count,
        4 * count,
        8 * count,
    )
    assert "CUDA" not in found


@pytest.mark.parametrize(("dtype", "per_parameter"), [("bf16", 2 + 2 + 6), ("fp32", 4 + 4 + 8)])
def test_full_fine_tune(geometry: Geometry, dtype: str, per_parameter: int) -> None:
    found = rows(storage(method="full", dtype=dtype, weights=dtype), geometry)
    state = found["trained weights"] + found["gradients"] + found["optimizer state"]
    assert state == per_parameter * 2 * GIB
    assert "base weights" not in found


def test_int8_halves_what_can_be_quantised(geometry: Geometry) -> None:
    found = rows(storage(weights="int8", checkpointing=True), geometry)
    assert found["base weights"] == GIB + 2 * GIB
    assert "while building" not in found


def test_nf4_takes_half_a_byte_and_its_scales(geometry: Geometry) -> None:
    found = rows(storage(weights="nf4", checkpointing=True), geometry)
    scales = GIB // 64 + GIB // 64 // 256 * 4
    assert found["base weights"] == GIB // 2 + scales + 2 * GIB
    assert found["activations"] == geometry.activation_bytes_checkpointed
    assert "while building" not in found


def test_nf4_layers_keep_no_inputs_for_backward(geometry: Geometry) -> None:
    assert rows(storage(weights="nf4"), geometry)["activations"] == geometry.activation_bytes
    assert rows(storage(weights="int8"), geometry)["activations"] == geometry.activation_bytes_int8


def test_nf4_bytes_are_those_of_a_real_layer() -> None:
    import torch

    from trainer.hardware.geometry import ComponentGeometry
    from trainer.modeling.quantize import replacer

    replace = replacer("nf4", (), torch.bfloat16)
    assert replace is not None
    layer = replace("layer", torch.nn.Linear(512, 1024, bias=False, dtype=torch.bfloat16))
    assert layer is not None
    tensors = {name: value for name, value in layer.state_dict().items() if "quant_state" not in name}
    real = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    part = ComponentGeometry(name="t", role="trained", shapes={"layer.weight": (1024, 512)}, source="test")
    geometry = Geometry(
        components=(part,),
        lora_parameters=0,
        quantized_parameters=1024 * 512,
        quantized_rows=1024,
        activation_bytes=0,
        activation_bytes_checkpointed=0,
        activation_bytes_int8=0,
        activation_bytes_checkpointed_int8=0,
    )
    assert real <= rows(storage(weights="nf4"), geometry)["base weights"] <= real + 2048


def test_a_stored_base_has_the_bytes_of_its_files(geometry: Geometry) -> None:
    stored = dataclasses.replace(geometry, stored_as="nf4", stored_bytes=GIB)
    assert rows(storage(weights="nf4", stored=True), stored)["base weights"] == GIB + 2 * GIB


def test_a_random_int8_base_peaks_while_it_is_built(geometry: Geometry) -> None:
    chosen = storage(weights="int8", checkpointing=True, random_weights=True)
    found = memory.train_rows(chosen, geometry)
    assert memory.total([row for row in found if row.name != "CUDA"]) >= 4 * GIB


def test_previews_count_where_they_are_larger_than_training(geometry: Geometry) -> None:
    vae_bytes = 1024 * 1024 * 128 * 2
    recomputed = storage(checkpointing=True, previews=True)
    assert rows(recomputed, geometry)["activations"] == vae_bytes + 2 * GIB
    tiled = storage(checkpointing=True, previews=True, tiling=True)
    assert rows(tiled, geometry)["activations"] == GIB
    assert rows(storage(previews=True), geometry)["activations"] == 6 * GIB


def test_encoders_are_counted_one_stage_at_a_time(geometry: Geometry) -> None:
    stages = memory.cache_stages(storage(), geometry)
    assert list(stages) == ["text encoders", "VAE"]
    text, vae = (memory.total(found) / GIB for found in stages.values())
    assert text == pytest.approx(2.25 * 1.02 + 0.75, abs=0.01)
    assert vae == pytest.approx(2 * 2.25 * 1.02 + 0.75, abs=0.01)  # in fp32, whatever the run computes in


def test_disk(geometry: Geometry) -> None:
    count = geometry.lora_parameters
    # fp32 masters and two moments a checkpoint; two files in bf16
    assert memory.disk_bytes(storage(), geometry, checkpoints=4) == count * (4 * 12 + 2 * 2)
    full = storage(method="full")
    assert memory.disk_bytes(full, geometry, checkpoints=2) == 2 * GIB * (2 * 8 + 2)
    assert memory.disk_bytes(full, geometry, checkpoints=0) == 2 * GIB * 2
