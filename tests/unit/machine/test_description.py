"""The machine as a record of measurements describes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.machine import description
from trainer.machine.idle import Gpu


@pytest.mark.parametrize(("total_mib", "gib"), [(143771, 140.4), (None, 119.7)])
def test_memory_of_a_gpu_that_shares_the_host_s_is_the_host_s(
    total_mib: int | None, gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi of a DGX Spark answers `[N/A]`."""
    gpu = Gpu(name="NVIDIA GB10", driver="580.95.05", total_mib=total_mib, used_mib=None, utilisation=0)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       125513728 kB\nMemAvailable:   12345678 kB\n")
    monkeypatch.setattr(description, "read_gpu", lambda name: (gpu, ()))
    monkeypatch.setattr(description, "_MEMINFO", meminfo)
    assert description.describe("2026-11").gpu_gib == gib
