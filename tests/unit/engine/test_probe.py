"""The probe's bookkeeping and its processes; what a GPU measures is in tests/gpu."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.planning.conftest import machine, with_gpu
from trainer.cli.probe import describe
from trainer.config import environment
from trainer.engine.probing import attention, probe
from trainer.engine.probing.child import Measured
from trainer.families.values import AttentionShape
from trainer.machine.facts import KernelVerdict
from trainer.modeling.attention import packed_rows
from trainer.planning.shapes.shape_classes import matmul_shape_class, shape_class
from trainer.ways.storages import WAYS

SHAPE = AttentionShape(batch_size=1, heads=2, head_width=16, tokens=32)
BEGUN = '{"held": 0.0}\n'
GOOD = BEGUN + '{"errors": {"output": 0.001}, "milliseconds": 1.5}'
BAD = BEGUN + '{"errors": {"output": 0.001, "gradient of the key": 0.5}, "milliseconds": 1.0}'
SILENT = (0, "never begins")
KERNELS = ("attention.flash", "attention.cudnn", "attention.math")
FLASH_2 = "attention.flash_attn_2"
HEAD = """\
import os

import torch


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
"""
RIGHT = "    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)\n"


class Process:
    """A process that ends with the next of `answers`: (exit code, its words), or never."""

    answers: list[Any]
    started: int
    running: int

    def __init__(self, command: list[str], **_: object) -> None:
        Process.started += 1
        Process.running += 1
        self.returncode = 0
        self.killed_before, self.said = False, ""

    def communicate(self, request: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        if request is None:
            Process.running -= not self.killed_before
            self.killed_before = True
            return self.said, ""
        answer = self.answers.pop(0)
        if answer is None or answer == SILENT:
            self.said = BEGUN if answer is None else ""
            raise subprocess.TimeoutExpired("probe", 1.0)
        self.returncode, text = answer
        return text, text

    def kill(self) -> None:
        pass


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """List of answers (exit code, output) that the next processes give."""
    Process.answers, Process.started, Process.running = [], 0, 0
    monkeypatch.setattr(subprocess, "Popen", Process)
    return Process.answers


def test_a_crash_and_a_wrong_result_are_verdicts(answers: list[Any]) -> None:
    answers.extend([(0, GOOD), (-11, f"{BEGUN}last words"), (0, BAD)])
    found = probe.probe(KERNELS, SHAPE, "bf16", {}).verdicts
    assert [verdict.works for verdict in found] == [True, False, False]
    assert found[0].shape_class == "b1 h2 d16 n32"
    assert "SIGSEGV: last words" in found[1].reason
    assert "5.0e-01 against float32 (gradient of the key)" in found[2].reason
    assert (Process.started, Process.running) == (3, 0)


def test_the_reason_is_the_exception_not_the_advice_after_it(answers: list[Any]) -> None:
    said = "warning: x\nTraceback\ntorch.AcceleratorError: CUDA error: not permitted\nCompile with this\n"
    answers.append((1, BEGUN + said))
    (found,) = probe.probe(KERNELS[:1], SHAPE, "bf16", {}).verdicts
    assert found.reason == "failed: torch.AcceleratorError: CUDA error: not permitted"


def test_a_kernel_that_hangs_alone_has_failed(answers: list[Any]) -> None:
    answers.extend([None, (0, GOOD)])
    found = probe.probe(KERNELS[:2], SHAPE, "bf16", {}).verdicts
    assert [verdict.works for verdict in found] == [False, True]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "RuntimeError: CUDA-capable device(s) is/are busy or unavailable"),
        (1, f"{BEGUN.replace('0.0', '0.6')}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"),
        (1, f"{BEGUN}FileNotFoundError: [Errno 2] No such file or directory: 'gcc'"),
        (1, f"{BEGUN}torch._inductor.exc.InductorError: OSError: [Errno 28] No space left on device"),
        (-9, BEGUN),
        (-15, BEGUN),
        SILENT,
    ],
)
def test_what_is_not_about_the_kernel_is_no_verdict(answers: list[Any], code: int, words: str) -> None:
    answers.append((code, words))
    found = probe.probe(KERNELS[:1], SHAPE, "bf16", {})
    assert not found.verdicts
    (told,) = found.unsettled
    assert told.kernel == KERNELS[0] and not told.works and told.reason
    assert Process.running == 0


def test_a_kernel_that_is_slow_on_busy_cores_is_not_kept_as_failed(answers: list[Any]) -> None:
    answers.append(None)
    found = probe.probe(KERNELS[:1], SHAPE, "fp32", {}, device="cpu")
    assert not found.verdicts and found.unsettled[0].reason.startswith("no result within")


def test_a_kernel_that_needs_more_than_the_whole_gpu_has_failed(answers: list[Any]) -> None:
    answers.append((1, f"{BEGUN}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 90 GiB"))
    found = probe.probe(KERNELS[:1], SHAPE, "bf16", {})
    assert [row.works for row in found.verdicts] == [False]


def test_what_others_held_is_told_of(answers: list[Any]) -> None:
    answers.extend([(0, GOOD), (0, GOOD.replace("0.0}", "0.4}", 1))])
    assert probe.probe(KERNELS[:2], SHAPE, "bf16", {}).held == 0.4


def test_a_verdict_is_of_its_type(answers: list[Any]) -> None:
    answers.extend([(0, GOOD), (-11, BEGUN), (0, GOOD)])
    kernels = ("attention.flash", "attention.math", "matmul.bf16")
    found = probe.probe(kernels, SHAPE, "fp16", {}).verdicts
    assert [row.dtype for row in found] == ["fp16", "fp16", "bf16"], "linear layers are measured in bf16"
    facts = dataclasses.replace(machine("h200"), verdicts=found)
    assert probe.unmeasured(kernels, facts, SHAPE, "fp16") == ()
    assert probe.unmeasured(kernels, facts, SHAPE, "bf16") == kernels[:2]


def test_a_kernel_that_no_time_was_left_for_gets_no_verdict(answers: list[Any]) -> None:
    answers.extend([(0, GOOD), None])
    found = probe.probe(KERNELS, SHAPE, "bf16", {}).verdicts
    assert [verdict.kernel for verdict in found] == ["attention.flash"]
    assert Process.running == 0, "the process that had started for the third one is ended too"


@pytest.mark.parametrize(("cores", "most"), [(1, 2), (8, 3), (64, 4)])
def test_as_many_processes_start_ahead_as_there_are_cores_for(
    answers: list[Any], monkeypatch: pytest.MonkeyPatch, cores: int, most: int
) -> None:
    running: list[int] = []

    def ask(process: Process, request: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        if request is not None:
            running.append(Process.running)
        return communicate(process, request, timeout)

    communicate = Process.communicate
    monkeypatch.setattr(Process, "communicate", ask)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    names = ("attention.flash", "attention.cudnn", "attention.math", "matmul.bf16")
    answers.extend([(0, GOOD)] * len(names))
    found = probe.probe(names, SHAPE, "bf16", {})
    assert [verdict.kernel for verdict in found.verdicts] == list(names)
    assert running[0] == most
    assert Process.started == len(names)
    assert Process.running == 0


def test_what_is_not_installed_starts_no_process(answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: None)
    names = [FLASH_2, "attention.flash_attn_3", "attention.flash_attn_4", "matmul.nf4"]
    found = probe.probe(names, SHAPE, "bf16", {}).verdicts
    assert [(verdict.kernel, verdict.works, verdict.reason) for verdict in found] == [
        (name, False, "not installed") for name in names
    ]
    assert found[-1].shape_class == "m32 n96 k32"
    assert Process.started == 0


def test_the_fourth_flash_attn_without_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert probe._installed("attention.flash_attn_4")
    assert not probe._installed(FLASH_2)


def test_nan_is_a_verdict() -> None:
    errors = {"output": 0.001, "gradient of the value": float("nan"), "gradient of the query": float("inf")}
    found = probe.judge("attention.flash", SHAPE, Measured(milliseconds=1.0, errors=errors))
    assert not found.works
    assert found.reason == "not finite: gradient of the value, gradient of the query"


def test_quantised_matmuls_may_be_as_far_off_as_their_row_says() -> None:
    for name, way in probe.matmul_kernels().items():
        for error in (0.9 * way.tolerance, 1.1 * way.tolerance):
            measured = Measured(milliseconds=1.0, errors={"output": error})
            assert probe.judge(name, SHAPE, measured).works == (error < way.tolerance), name
    assert WAYS["bf16"].tolerance < WAYS["int8"].tolerance < WAYS["fp8"].tolerance < WAYS["nf4"].tolerance


def test_verdicts_are_kept_until_a_package_comes_or_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine("h200")
    there: set[str] = {"attention.flash", FLASH_2}
    monkeypatch.setattr(probe, "_installed", lambda name: name in there)

    def remember(*kernels: str) -> None:
        nonlocal facts
        rows = tuple(
            KernelVerdict(
                kernel=name,
                shape_class=shape_class(SHAPE),
                works=name in there,
                milliseconds=None,
                relative_error=None,
                reason="measured" if name in there else probe.NOT_INSTALLED,
            )
            for name in kernels
        )
        facts = dataclasses.replace(facts, verdicts=rows)

    asked = ("attention.flash", FLASH_2)
    assert probe.unmeasured(asked, dataclasses.replace(facts, verdicts=()), SHAPE, "bf16") == asked
    remember(*asked)
    assert probe.unmeasured(asked, facts, SHAPE, "bf16") == ()
    assert probe.unmeasured(asked, facts, dataclasses.replace(SHAPE, tokens=64), "bf16") == asked
    there.discard(FLASH_2)
    assert probe.unmeasured(asked, facts, SHAPE, "bf16") == (FLASH_2,)
    remember(*asked)
    assert probe.unmeasured(asked, facts, SHAPE, "bf16") == ()
    there.add(FLASH_2)
    assert probe.unmeasured(asked, facts, SHAPE, "bf16") == (FLASH_2,)


def test_what_a_machine_could_run() -> None:
    hopper = machine("h200")
    everything = {*probe.attention_kernels(), *probe.matmul_kernels()}
    assert set(probe.kernels_for(hopper, "cuda", "bf16")) == everything
    assert set(probe.kernels_for(hopper, "cuda", "fp32")) == set(probe.attention_kernels())
    ada, ampere = (with_gpu(hopper, capability=capability) for capability in ((8, 9), (8, 0)))
    assert everything - set(probe.kernels_for(ada, "cuda", "bf16")) == {"attention.flash_attn_3"}
    missing = everything - set(probe.kernels_for(ampere, "cuda", "bf16"))
    assert missing == {"attention.flash_attn_3", "matmul.fp8"}
    assert probe.kernels_for(machine("cpu"), "cpu", "fp32") == ("attention.math",)


def test_the_matmul_is_that_of_queries_keys_and_values() -> None:
    shape = AttentionShape(batch_size=2, heads=24, head_width=128, tokens=4608)
    assert matmul_shape_class(shape) == "m9216 n9216 k3072"


def test_a_language_models_call_has_a_class_of_its_own() -> None:
    shape = AttentionShape(batch_size=1, heads=32, head_width=128, tokens=4096, key_heads=8, causal=True)
    assert shape_class(shape) == "b1 h32/8 d128 n4096 causal of 1"
    assert matmul_shape_class(shape) == "m4096 n6144 k4096"
    plain = dataclasses.replace(shape, key_heads=32, causal=False)
    assert shape_class(plain) == "b1 h32 d128 n4096"
    assert shape_class(dataclasses.replace(shape, samples=8)) == "b1 h32/8 d128 n4096 causal of 8"


def test_a_packed_row_is_measured_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided anew in each call: kernels that plan for a length pay for it here as in a run."""
    seen = []
    attend = packed_rows.packed_attention

    def recorded(*inputs: Any, segments: Any) -> Any:
        seen.append(segments)
        return attend(*inputs, segments=segments)

    monkeypatch.setattr(packed_rows, "packed_attention", recorded)
    shape = AttentionShape(
        batch_size=1, heads=4, head_width=8, tokens=64, key_heads=2, causal=True, samples=5
    )
    found = attention.measure_attention("math", "fp32", shape, "cpu", lambda: None, packaged=False)
    assert max(found.errors.values()) < 1e-6
    assert {(sum(one), len(one), min(one) >= 1) for one in seen} == {(64, 5, True)}
    # none but the exact one's comes twice, so that nothing that a kernel keeps by length helps
    assert len(seen) == 15 and len(set(seen)) == 14


@pytest.fixture
def flash_attn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., KernelVerdict]:
    """flash_attn(body): the verdict on an installed package of that name whose function ends so."""

    def ask(body: str, shape: AttentionShape = SHAPE) -> KernelVerdict:
        (tmp_path / "flash_attn.py").write_text(HEAD + body)
        monkeypatch.syspath_prepend(tmp_path)
        variables = {**environment.snapshot(), "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        found = probe.probe([FLASH_2], shape, "fp32", variables, device="cpu")
        (verdict,) = (*found.verdicts, *found.unsettled)
        return verdict

    return ask


def test_a_kernel_that_works_in_its_process(flash_attn: Callable[..., KernelVerdict]) -> None:
    found = flash_attn(RIGHT)
    assert found.works, found.reason
    assert found.milliseconds is not None and found.milliseconds > 0
    assert found.relative_error is not None and found.relative_error < 1e-5


@pytest.mark.slow
def test_a_kernel_that_reads_ahead(flash_attn: Callable[..., KernelVerdict]) -> None:
    shape = dataclasses.replace(SHAPE, heads=4, key_heads=1, causal=True)
    grouped = RIGHT.replace("(q, k, v)", "(q, k, v, is_causal=causal, enable_gqa=True)")
    assert flash_attn(grouped, shape).works
    assert not flash_attn(grouped.replace("is_causal=causal", "is_causal=False"), shape).works


def test_a_kernel_that_takes_its_process_with_it(flash_attn: Callable[..., KernelVerdict]) -> None:
    found = flash_attn("    os.abort()\n")
    assert not found.works
    assert "crashed with SIGABRT" in found.reason


@pytest.mark.slow
def test_a_kernel_with_a_wrong_gradient(flash_attn: Callable[..., KernelVerdict]) -> None:
    found = flash_attn("    k.register_hook(lambda gradient: gradient * 1.1)\n" + RIGHT)
    assert not found.works
    assert found.relative_error == pytest.approx(0.1, rel=1e-3)
    assert "(gradient of the key), allowed 0.02" in found.reason


@pytest.mark.slow
def test_a_kernel_that_no_compiler_traces(flash_attn: Callable[..., KernelVerdict]) -> None:
    found = flash_attn("    torch._dynamo.graph_break()\n" + RIGHT)
    assert not found.works
    assert found.reason.startswith("failed: ")


@pytest.mark.slow
def test_torchs_own_kernel_and_a_matmul_in_their_processes() -> None:
    variables = {**environment.snapshot(), "OMP_NUM_THREADS": "1"}
    kernels = ["attention.math", "matmul.bf16"]
    found = probe.probe(kernels, SHAPE, "bf16", variables, device="cpu").verdicts
    assert [(one.kernel, one.works, one.shape_class) for one in found] == [
        ("attention.math", True, "b1 h2 d16 n32"),
        ("matmul.bf16", True, "m32 n96 k32"),
    ]
    assert all(one.relative_error is not None and 0 < one.relative_error < 0.02 for one in found)


@pytest.mark.slow
def test_fp16_is_measured_as_fp16() -> None:
    variables = {**environment.snapshot(), "OMP_NUM_THREADS": "1"}
    (found,) = probe.probe(["attention.math"], SHAPE, "fp16", variables, device="cpu").verdicts
    assert found.works and found.dtype == "fp16", found.reason
    assert found.relative_error is not None and found.relative_error < 1e-3, "bf16 would be further off"


def test_a_gpu_that_is_not_there_is_nobodys_verdict() -> None:
    """Measured on the CPU instead, every kernel would be kept as a slow one of the GPU."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    variables = {**environment.snapshot(), "OMP_NUM_THREADS": "1"}
    found = probe.probe(["attention.math"], SHAPE, "bf16", variables, device="cuda")
    assert not found.verdicts
    assert found.unsettled[0].reason.startswith("before it began: failed: ")


def test_what_others_hold_of_unified_memory_is_the_hosts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA itself counts the page cache as taken there."""
    import torch

    gib = 1024**3
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 128000 kB\nMemFree: 1000 kB\nMemAvailable: 32000 kB\n")
    device = SimpleNamespace(is_integrated=True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 * gib, 24 * gib))
    monkeypatch.setattr(probe, "MEMINFO", meminfo)
    assert probe.held_by_others("cuda") == 0.75
    device.is_integrated = False
    assert probe.held_by_others("cuda") == pytest.approx(23 / 24)
    assert probe.held_by_others("cpu") == 0.0


def test_the_process_ends_where_nobody_asks() -> None:
    """The child ends if its parent was killed before it asked."""
    done = subprocess.run(
        [sys.executable, "-m", "trainer.engine.probing"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env=os.environ,
    )
    assert (done.returncode, done.stdout) == (0, b"")


@pytest.mark.parametrize("kernel", ["bf16", "fp8", "int8", "nf4"])
def test_stored_weights_are_multiplied_within_their_tolerance(kernel: str) -> None:
    if kernel == "nf4":
        pytest.importorskip("bitsandbytes")
    from trainer.engine.probing.matmul import measure_matmul

    measured = measure_matmul(kernel, 48, 384, 128, "cpu", lambda: None)
    verdict = probe.judge(f"matmul.{kernel}", SHAPE, measured)
    assert verdict.works, verdict.reason
    assert set(measured.errors) == {"output", "gradient of the input"}
    assert min(measured.errors.values()) > 1e-4, "the reference is float32, not the kernel itself"


def test_verdicts_are_printed_as_a_table() -> None:
    rows = [
        ("matmul.bf16", "m32 n96 k32", True, 0.5, 0.0016, "good"),
        ("attention.math", "b1", True, 12.25, 0.0017, "good too"),
        ("attention.cudnn", "b1", False, None, None, "crashed"),
        ("attention.flash", "b1", True, 1.0, 0.002, "good"),
    ]
    names = ("kernel", "shape_class", "works", "milliseconds", "relative_error", "reason")
    verdicts = tuple(KernelVerdict(**dict(zip(names, row, strict=True))) for row in rows)
    lines = describe(dataclasses.replace(machine("h200"), verdicts=verdicts))
    assert lines[lines.index("") + 1 :] == [
        "kernel           verdict      ms  relative error  at           reason",
        "attention.flash  works     1.000         2.0e-03  b1           good",
        "attention.math   works    12.250         1.7e-03  b1           good too",
        "attention.cudnn  FAILS         -               -  b1           crashed",
        "matmul.bf16      works     0.500         1.6e-03  m32 n96 k32  good",
    ]
