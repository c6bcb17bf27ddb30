"""DISABLE_CPU_OFFLOAD: no block waits in host memory, whatever fits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.planning.conftest import machine
from tests.unit.planning.test_swapping import planned, row, shipped
from trainer.errors import ConfigError, HardwareError


@pytest.fixture(autouse=True)
def _no_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_CPU_OFFLOAD", "True")


def test_auto_never_swaps_and_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HardwareError, match=r"training needs 23\.5 GiB at least") as caught:
        planned(shipped("flux2_dev_lora"), machine("rtx-4090"))
    remedy = caught.value.problems[0].remedy
    assert remedy.startswith("fits without DISABLE_CPU_OFFLOAD (")
    assert "features.block_swap" not in remedy, "the variable would forbid it again"
    monkeypatch.setenv("DISABLE_CPU_OFFLOAD", "0")
    peak = planned(shipped("flux2_dev_lora"), machine("rtx-4090")).peak_bytes
    assert f"fits without DISABLE_CPU_OFFLOAD ({peak / 1024**3:.1f} GiB)" in remedy


def test_what_fits_anyway_has_the_reason_in_its_plan() -> None:
    plan = planned(shipped("flux1_dev_lora"), machine("rtx-4090"))
    decision = row(plan, "block_swap")
    assert (decision.value, decision.source) == ("0", "DISABLE_CPU_OFFLOAD=true")
    assert decision.reason == "as written: no weights wait in host memory"
    assert plan.swapped_blocks == 0


def test_blocks_that_were_written_contradict_it() -> None:
    with pytest.raises(ConfigError) as caught:
        planned(shipped("flux2_dev_lora", features__block_swap=8), machine("rtx-4090"))
    assert str(caught.value) == (
        "my.yaml:7: features.block_swap is 8, but DISABLE_CPU_OFFLOAD is true\n    -> leave one of them out"
    )


def test_a_zero_that_was_written_stays_the_users() -> None:
    plan = planned(shipped("flux1_dev_lora", features__block_swap=0), machine("rtx-4090"))
    assert row(plan, "block_swap").source == "my.yaml:7"


@pytest.mark.parametrize("changes", [{}, {"features__weights": "bf16"}])
def test_what_fits_nowhere_is_not_blamed_on_it(changes: dict[str, Any]) -> None:
    with pytest.raises(HardwareError) as caught:
        planned(shipped("flux1_dev_full", **changes), machine("rtx-4090"))
    assert "DISABLE_CPU_OFFLOAD" not in str(caught.value)
