"""The probe's bookkeeping; what it measures is in tests/gpu."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from trainer.engine import probe
from trainer.families.protocol import AttentionShape

SHAPE = AttentionShape(batch_size=1, heads=2, head_width=16, tokens=32)
GOOD = '{"error": 0.001, "milliseconds": 1.5}'


def fake(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        answer = answers.pop(0)
        if answer is None:
            raise subprocess.TimeoutExpired(command, 1.0)
        code, text = answer
        return subprocess.CompletedProcess(command, code, stdout=text, stderr=text)

    monkeypatch.setattr(probe.subprocess, "run", run)


def test_a_crash_and_a_wrong_result_are_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, [(0, GOOD), (-11, "last words"), (0, '{"error": 0.5, "milliseconds": 1.0}')])
    found = probe.probe_attention(SHAPE, "bf16", ["flash", "cudnn", "math"], {})
    assert [verdict.works for verdict in found] == [True, False, False]
    assert "SIGSEGV: last words" in found[1].reason
    assert "5.0e-01" in found[2].reason


def test_a_kernel_that_hangs_alone_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, [None, (0, GOOD)])
    found = probe.probe_attention(SHAPE, "bf16", ["flash", "math"], {})
    assert [verdict.works for verdict in found] == [False, True]


def test_a_kernel_that_no_time_was_left_for_gets_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, [(0, GOOD), None])
    found = probe.probe_attention(SHAPE, "bf16", ["flash", "cudnn", "math"], {})
    assert [verdict.kernel for verdict in found] == ["attention.flash"]
