"""Figures read from a profiler's trace: busy time, gaps, and kinds of kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench import trace


def event(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "cat": category, "tid": 1}


def test_busy_time_is_the_union_of_overlapping_kernels(tmp_path: Path) -> None:
    events = [
        event("nvjet_tst_256x128_TNN", 0.0, 4000.0),
        event("triton_poi_fused_add_3", 3000.0, 2000.0),  # 1 ms of it beside the product
        event("Memcpy HtoD", 6000.0, 1000.0, "gpu_memcpy"),
        event("aten::mm", 0.0, 9000.0, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    summary = trace.summarize(trace.read_trace(path), 2)
    assert (summary.wall, summary.busy) == (3.5, 3.0), "per step, of two"
    assert summary.copy_share == pytest.approx(0.5 / 3.5)
    assert [(gap.milliseconds, gap.before) for gap in summary.gaps] == [(1.0, "Memcpy HtoD")]
    assert {one.name: one.milliseconds for one in summary.groups} == {
        "matmul bf16": 2.0,
        "triton pointwise": 1.0,
        "memcpy": 0.5,
    }
    assert "gaps" in trace.summary_text(summary)


def test_without_a_device_the_outermost_operators_count() -> None:
    events = [
        event("aten::linear", 0.0, 10.0, "cpu_op"),
        event("aten::addmm", 1.0, 8.0, "cpu_op"),
        event("aten::mul", 10.0, 5.0, "cpu_op"),
    ]
    assert [kernel.name for kernel in trace.kernels_of(events)] == ["aten::linear", "aten::mul"]


@pytest.mark.parametrize(
    ("name", "microseconds", "group"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", 120.0, "matmul bf16"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", 9.0, "small matmul (LoRA, modulation)"),
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT", 62.0, "matmul fp8"),
        ("void cutlass::device_kernel<...float_e4m3_t...>", 62.0, "matmul fp8"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", 4.0, "small matmul (LoRA, modulation)"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 500.0, "attention forward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", 1200.0, "attention backward"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", 1200.0, "attention backward"),
        ("void cudnn::fusion::compute_dot_do_o_specialized", 30.0, "attention backward"),
        ("triton_red_fused_native_layer_norm_4", 30.0, "triton reductions"),
        ("triton_poi_fused__to_copy_float8_e4m3fn_1", 30.0, "triton pointwise"),
        ("_quantize", 30.0, "quantise and transpose"),
        ("_transpose", 30.0, "quantise and transpose"),
        ("_head_norm_backward", 30.0, "reductions"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>", 30.0, "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", 30.0, "pointwise"),
        ("void at::native::reduce_kernel<512, 1>", 30.0, "reductions"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, microseconds: float, group: str) -> None:
    kernel = trace.Kernel(name=name, start=0.0, duration=microseconds, kind="kernel")
    assert trace.group_of(kernel) == group
