"""Predicted memory against what was measured on an H200, and the arithmetic of each row."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.planning.conftest import GIB, kept, way_of
from trainer.modeling.storage.host_blocks import spread_blocks
from trainer.planning.cost import disk, memory
from trainer.planning.cost.storage import Storage
from trainer.planning.shapes.geometry import ComponentGeometry, Geometry, Linears, Stack

NONE = kept(0, inputs=0, block=0)


def storage(**changes: Any) -> Storage:
    """A LoRA in bf16 with these changes; a way by its words."""
    values: dict[str, Any] = {
        "method": "lora",
        "device": "cuda",
        "dtype": "bf16",
        "checkpointing": False,
        "tiling": False,
        "previews": False,
        "attention": "flash",
    }
    return Storage(way=way_of(changes), **{**values, **changes})


def rows(chosen: Storage, geometry: Geometry) -> dict[str, int]:
    return {row.name: row.bytes for row in memory.train_rows(chosen, geometry)}


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
    assert "CUDA" not in found and found["process"] == GIB


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
    assert found["activations"] == geometry.activations.peak(recomputed=57) == GIB
    assert "while building" not in found


def test_quantised_layers_keep_no_inputs_for_backward(geometry: Geometry) -> None:
    for weights in ("nf4", "int8", "fp8"):
        assert rows(storage(weights=weights), geometry)["activations"] == 6 * GIB


def test_fp8_takes_a_byte_and_a_scale_a_row_for_each_copy(geometry: Geometry) -> None:
    scaled = dataclasses.replace(geometry, quantized=dataclasses.replace(geometry.quantized, rows=1000))
    once = rows(storage(weights="fp8", compute="fp8"), scaled)
    assert once["base weights"] == GIB + 4 * 1000 + 2 * GIB
    assert "fp8 transposed" not in once  # the geometry has no matrix
    twice = rows(storage(weights="fp8", compute="fp8", weight_copies=2), scaled)
    assert twice["base weights"] == 2 * GIB + 4 * 1000 + 2 * GIB  # scales lie along one axis: both share them


def with_largest(geometry: Geometry) -> Geometry:
    """The geometry whose largest weight is known."""
    return dataclasses.replace(
        geometry, quantized=dataclasses.replace(geometry.quantized, largest=1024 * 4096)
    )


@pytest.mark.parametrize(
    ("changes", "name", "bytes_a_value"),
    [
        ({"weights": "fp8", "compute": "fp8"}, "fp8 transposed", 1),
        ({"weights": "fp8"}, "fp8 unpacked", 2),
        ({"weights": "int8"}, "int8 unpacked", 2),
    ],
)
def test_one_weight_at_a_time_is_unpacked(
    geometry: Geometry, changes: dict[str, Any], name: str, bytes_a_value: int
) -> None:
    geometry = with_largest(geometry)
    assert rows(storage(**changes), geometry)[name] == 1024 * 4096 * bytes_a_value


def test_nf4_is_unpacked_with_its_scales_as_bitsandbytes_unpacks_them(geometry: Geometry) -> None:
    import torch
    from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise, quantize_4bit

    largest = torch.zeros(1024, 4096, dtype=torch.bfloat16)
    packed, state = quantize_4bit(largest, quant_type="nf4", compress_statistics=True)
    scales, values = dequantize_blockwise(state.absmax, state.state2), dequantize_4bit(packed, state)
    found = rows(storage(weights="nf4"), with_largest(geometry))
    assert found["nf4 unpacked"] == values.nbytes + scales.nbytes == 1024 * 4096 * 2 + 1024 * 4096 // 64 * 4


@pytest.mark.parametrize("group", [2, 3, 4, 8])
def test_no_gpu_has_more_of_a_shared_base_than_is_planned(geometry: Geometry, group: int) -> None:
    """Blocks of two sizes, dealt in turn as the run deals them."""
    sizes = {"double": 20_000_000, "single": 10_000_000}
    stacks = [
        Stack(name=name, blocks=count, quantized=Linears(parameters=size), others=0, fp32=0)
        for (name, size), count in zip(sizes.items(), (19, 38), strict=True)
    ]
    order = ("double",) * 19 + ("single",) * 38
    of_each = dataclasses.replace(geometry.activations, stacks=order)
    shared = dataclasses.replace(geometry, stacks=(stacks[1], stacks[0]), activations=of_each)
    blocks: dict[str, Any] = {f"{name}.{number}": None for number, name in enumerate(order)}
    for count in range(1, 58):
        names = spread_blocks(blocks, count)
        own = [names[first::group] for first in range(group)]
        bytes_each = [sum(2 * sizes[name.split(".")[0]] for name in some) for some in own]
        real = 4 * GIB - sum(bytes_each) + max(bytes_each)
        found = memory.train_rows(storage(sharded=count, group=group, ranks=group), shared)
        (base,) = (row for row in found if row.name == "base weights")
        assert real <= base.bytes <= real + 2 * sizes["double"]
        assert base.bytes == real or count < 57
        assert base.detail.endswith(f"; without {count - len(own[0])} of 57 blocks")


def test_a_transposed_copy_needs_no_transposing(geometry: Geometry) -> None:
    geometry = with_largest(geometry)
    twice = rows(storage(weights="fp8", compute="fp8", weight_copies=2), geometry)
    assert "fp8 transposed" not in twice


@pytest.mark.parametrize("copies", [1, 2])
def test_modulation_beside_fp8_takes_a_byte_a_value_once(geometry: Geometry, copies: int) -> None:
    """1.5 of the 2 GiB outside of FP8 are modulation, whose largest weight is unpacked to bf16."""
    mod = Linears(parameters=3 * GIB // 4, rows=1000, largest=1024 * 4096)
    found = dataclasses.replace(with_largest(geometry), modulation=mod)
    packed = storage(weights="fp8", compute="fp8", weight_copies=copies, modulation="int8")
    held = rows(packed, found)
    assert held["base weights"] == copies * GIB + 3 * GIB // 4 + 4 * 1000 + GIB // 2
    assert held["int8 unpacked"] == 1024 * 4096 * 2
    assert "fp8 transposed" not in held  # at another time, and half as large
    kept = rows(storage(weights="fp8", compute="fp8", weight_copies=copies), found)
    assert kept["base weights"] == copies * GIB + 2 * GIB
    assert "int8 unpacked" not in kept


def test_a_budget_needs_what_was_counted(geometry: Geometry) -> None:
    def needed(share: float) -> int:
        return rows(storage(compile=True, activation_budget=share), geometry)["activations"] // GIB

    # those that were counted, and what a larger one needs for those between
    assert [needed(share) for share in (1.0, 0.9, 0.6, 0.4, 0.2, 0.1)] == [5, 5, 3, 3, 2, 2]
    assert rows(storage(compile=True, checkpointing=True), geometry)["activations"] == GIB


def test_the_first_blocks_alone_may_be_recomputed(geometry: Geometry) -> None:
    first = rows(storage(checkpointing=True, recomputed=19), geometry)["activations"]
    assert first == pytest.approx(4 * GIB + GIB / 6, rel=1e-6)  # two thirds, and the inputs of the others
    assert rows(storage(checkpointing=True, recomputed=57), geometry)["activations"] == GIB


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_exchanging_takes_the_bytes_of_its_buffers(geometry: Geometry, dtype: str, size: int) -> None:
    import torch

    from trainer.engine.optimizing.exchange import Exchange
    from trainer.engine.optimizing.fp32_masters import FlatGradients

    count, kind = geometry.lora_parameters, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    gradients = FlatGradients({"all": torch.nn.Parameter(torch.zeros(count, dtype=kind))})
    ranks: Any = SimpleNamespace(size=size)
    tensors = [one for one in vars(Exchange(ranks, gradients)).values() if isinstance(one, torch.Tensor)]
    buffers = [one.nbytes for one in tensors if one.numel() > 1 and one is not gradients.latest]
    assert len(buffers) == 4
    # sums are gathered into one tensor that NCCL makes, and copied to those of each rank
    found = rows(storage(dtype=dtype, weights=dtype, ranks=size), geometry)
    assert found["exchange"] == sum(buffers) + 4 * count
    assert "exchange" not in rows(storage(dtype=dtype, weights=dtype), geometry)


def test_parameters_that_a_class_keeps_in_fp32_count_twice(geometry: Geometry) -> None:
    mixed = dataclasses.replace(geometry, fp32_parameters=1000)
    for weights in ("bf16", "int8", "fp8", "nf4"):
        more = rows(storage(weights=weights), mixed)["base weights"]
        assert more - rows(storage(weights=weights), geometry)["base weights"] == 2 * 1000
    full, plain = (rows(storage(method="full"), one) for one in (mixed, geometry))
    for name in ("trained weights", "gradients", "optimizer state"):
        assert full[name] - plain[name] == 2 * 1000


def test_the_host_holds_cuda_and_one_shard(geometry: Geometry) -> None:
    assert memory.total(memory.host_rows(storage(), geometry)) == 4 * GIB
    assert memory.host_rows(storage(device="cpu"), geometry) == ()


def test_nf4_bytes_are_those_of_a_real_layer() -> None:
    import torch

    from tests.quantized_layers import nf4_linear

    layer = nf4_linear(torch.nn.Linear(512, 1024, bias=False, dtype=torch.bfloat16))
    tensors = {name: value for name, value in layer.state_dict().items() if "quant_state" not in name}
    real = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    part = ComponentGeometry(name="t", role="trained", shapes={"layer.weight": (1024, 512)}, source="test")
    geometry = Geometry(
        components=(part,),
        lora_parameters=0,
        quantized=Linears(parameters=1024 * 512, rows=1024),
        activations=NONE,
        activations_compiled=NONE,
    )
    assert real <= rows(storage(weights="nf4"), geometry)["base weights"] <= real + 2048


def test_a_stored_base_has_the_bytes_of_its_files(geometry: Geometry) -> None:
    stored = dataclasses.replace(geometry, stored_as="nf4", stored_bytes=GIB)
    assert rows(storage(weights="nf4"), stored)["base weights"] == GIB + 2 * GIB


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
    assert disk.disk_bytes(storage(), geometry, checkpoints=4) == count * (4 * 12 + 2 * 2)
    full = storage(method="full")
    assert disk.disk_bytes(full, geometry, checkpoints=2) == 2 * GIB * (2 * 8 + 2)
    assert disk.disk_bytes(full, geometry, checkpoints=0) == 2 * GIB * 2
    # parameters that stay fp32 have fp32 weights and moments, and are so in the model's files
    kept = dataclasses.replace(geometry, fp32_parameters=GIB // 4)
    assert disk.disk_bytes(full, kept, checkpoints=2) == 2 * GIB * (2 * 8 + 2) + GIB // 4 * (2 * 4 + 2)
    assert disk.disk_bytes(storage(), kept, checkpoints=4) == count * (4 * 12 + 2 * 2)
