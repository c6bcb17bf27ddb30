"""Predicted times against what was measured on an H200, and how they follow the machine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from tests.unit.planning.conftest import machine, with_gpu
from tests.unit.planning.test_memory import storage
from trainer.config.schema import RunConfig
from trainer.families import get
from trainer.machine.facts import KernelVerdict
from trainer.planning.cost.roofline import Rates, Speed, milliseconds, rates, speed
from trainer.planning.shapes.geometry import Geometry
from trainer.planning.shapes.run_shapes import run_geometry

H200 = rates(machine("h200").gpus[0])
COMPILED: dict[str, Any] = {"compile": True}
RECOMPUTED: dict[str, Any] = {"checkpointing": True}
FP8: dict[str, Any] = {"weights": "fp8", "compute": "fp8", "weight_copies": 2}


@functools.cache
def full_size(family: str) -> Geometry:
    config = RunConfig.model_validate(
        {
            "family": family,
            "model": {"pretrained_model_name_or_path": "x/y"},
            "data": {"sets": [{"img_dir": "/data"}]},
            "output_dir": "/out",
        }
    )
    return run_geometry(get(family), config, model_folder=None, dtype="bf16", caption_tokens=512)


def predicted(family: str, attention: str = "cudnn", **changes: Any) -> float:
    assert H200 is not None
    return milliseconds(storage(**changes), full_size(family), Speed(rates=H200, attention=attention))


# 1024 px, batch 1, LoRA rank 16 on attention: measured with a prototype of the step on one H200, November
# 2026; of compiled blocks that are recomputed, and the last two, the trainer's own (docs/benchmarks.md)
@pytest.mark.parametrize(
    ("family", "attention", "changes", "measured_ms"),
    [
        ("flux1_dev", "flash", RECOMPUTED, 766),
        ("flux1_dev", "cudnn", {}, 494),
        ("flux1_dev", "flash", COMPILED, 417),
        ("flux1_dev", "cudnn", COMPILED, 346),
        ("flux1_dev", "cudnn", COMPILED | RECOMPUTED | {"weights": "int8"}, 435),
        ("flux1_dev", "cudnn", COMPILED | RECOMPUTED | FP8 | {"weight_copies": 1}, 316),
        ("flux1_dev", "cudnn", COMPILED | {"activation_budget": 0.3}, 401),
        ("flux1_dev", "cudnn", COMPILED | FP8, 281),
        ("flux1_dev", "flash", RECOMPUTED | {"weights": "int8"}, 890),
        ("flux2_dev", "cudnn", COMPILED | RECOMPUTED | FP8 | {"weight_copies": 1, "recomputed": 49}, 944),
        ("flux2_dev", "flash", RECOMPUTED, 2115),
        ("qwen_image", "cudnn", COMPILED, 352),
        ("qwen_image", "cudnn", COMPILED | FP8, 296),
        ("qwen_image", "flash", RECOMPUTED, 830),
        ("flux2_dev", "cudnn", RECOMPUTED, 1947),
        ("flux1_dev", "cudnn", RECOMPUTED, 661),
        # eager blocks that wait for the host
        ("flux1_dev", "cudnn_strided", FP8, 432),
        ("qwen_image", "cudnn", {}, 481),
        ("kandinsky5", "cudnn", {}, 453),
        # and one whose sequence is long enough not to
        ("flux1_kontext", "cudnn_strided", FP8, 817),
    ],
)
def test_prediction_is_within_12_percent_of_the_h200(
    family: str, attention: str, changes: dict[str, Any], measured_ms: float
) -> None:
    assert predicted(family, attention, **changes) == pytest.approx(measured_ms, rel=0.12)


def test_fp8_is_no_faster_than_bf16_where_eager_blocks_of_many_small_layers_wait_for_the_host() -> None:
    """Kandinsky took 634 ms in FP8 with 512 adapters, where bf16 took 453 with 408."""
    assert predicted("kandinsky5", **FP8) > predicted("kandinsky5")
    assert predicted("kandinsky5", **COMPILED, **FP8) < predicted("kandinsky5", **COMPILED)


def test_other_ways_to_call_cudnn_and_flash_attns_packages_count_as_cudnn() -> None:
    cudnn = predicted("flux1_dev", "cudnn")
    others = ("cudnn_strided", "flash_attn_2", "flash_attn_3", "flash_attn_4")
    assert {predicted("flux1_dev", name) for name in others} == {cudnn}
    assert cudnn < predicted("flux1_dev", "flash")


def test_work_of_a_forward_pass_is_that_which_was_counted() -> None:
    flux = full_size("flux1_dev")
    assert flux.matmul_flops == pytest.approx(59.5e12, rel=0.01)
    assert flux.attention_flops == pytest.approx(14.9e12, rel=0.01)
    assert (flux.blocks, flux.attention_calls) == (57, 57)
    large = full_size("flux2_dev")
    assert large.matmul_flops + large.attention_flops == pytest.approx(283e12, rel=0.01)


def test_a_text_only_block_makes_no_attention_call_over_the_image() -> None:
    geometry = full_size("kandinsky5")
    assert geometry.blocks > geometry.attention_calls > 0


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        (COMPILED, {}),
        ({}, RECOMPUTED),
        (COMPILED | {"activation_budget": 0.6}, COMPILED | {"activation_budget": 0.2}),
        (COMPILED | {"activation_budget": 0.2}, COMPILED | RECOMPUTED),
        (COMPILED | FP8, COMPILED | FP8 | {"weight_copies": 1}),
        (COMPILED | FP8 | {"weight_copies": 1}, COMPILED),
        (COMPILED, COMPILED | {"weights": "fp8"}),
        ({}, {"method": "full"}),
    ],
)
def test_order(faster: dict[str, Any], slower: dict[str, Any]) -> None:
    assert predicted("flux1_dev", **faster) < predicted("flux1_dev", **slower)


def test_a_slower_machine_takes_longer() -> None:
    def on(peaks: Rates | None) -> float:
        assert peaks is not None
        return milliseconds(storage(), full_size("flux1_dev"), Speed(rates=peaks, attention="cudnn"))

    times = [on(rates(machine(name).gpus[0])) for name in ("h200", "a100-80gb", "rtx-4090", "dgx-spark")]
    assert times == sorted(times)


def test_rates_go_by_name_and_an_unknown_gpu_has_none() -> None:
    facts = machine("h200")
    assert rates(with_gpu(facts, name="NVIDIA GH200 480GB").gpus[0]) != H200
    assert rates(with_gpu(facts, name="NVIDIA H100 80GB HBM3").gpus[0]) is not None
    assert rates(machine("too-old-gpu").gpus[0]) is None


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 504),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GeForce RTX 4090 D", 147),
        ("NVIDIA GeForce RTX 4080 SUPER", 104),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA GB200", None),
        ("NVIDIA A100X", None),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 144G HBM3e", 989),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB10", 125),
    ],
)
def test_a_card_that_is_only_called_alike_has_no_peak(name: str, bf16: float | None) -> None:
    """A wrong peak makes a wrong share of it (MFU), without a word."""
    found = rates(with_gpu(machine("h200"), name=name).gpus[0])
    assert (found.bf16 if found is not None else None) == bf16


def verdict(kernel: str, ms: float, shape_class: str, *, works: bool = True) -> KernelVerdict:
    return KernelVerdict(
        kernel=kernel,
        shape_class=shape_class,
        works=works,
        milliseconds=ms,
        relative_error=None,
        reason="test",
    )


def test_measured_kernels_replace_shares_of_the_peak(geometry: Geometry) -> None:
    attention, matmul = geometry.attention_shape_class, geometry.matmul_shape_class
    verdicts = [
        verdict("attention.cudnn", 2.0, attention),
        verdict("attention.flash", 1.0, attention, works=False),
        verdict("matmul.bf16", 1.0, matmul),
        verdict("matmul.nf4", 3.0, matmul),
        verdict("matmul.int8", 9.0, "m1 n1 k1"),
    ]
    gpu = machine("h200").gpu
    seen = speed(gpu, verdicts, geometry, "cudnn")
    assert (seen.attention_ms, dict(seen.matmul)) == (2.0, {"nf4": 3.0})
    assert speed(gpu, verdicts, geometry, "flash").attention_ms is None

    bf16, nf4 = (milliseconds(storage(weights=weights), geometry, seen) for weights in ("bf16", "nf4"))
    products = 2 * geometry.matmul_flops / (989e9 * 0.728)
    assert nf4 - bf16 == pytest.approx(2 * products, rel=0.01)
    twice = dataclasses.replace(seen, attention_ms=4.0)
    more = milliseconds(storage(), geometry, twice) - bf16
    assert more == pytest.approx(57 * 2.0)
