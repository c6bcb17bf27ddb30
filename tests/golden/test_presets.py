"""Every preset and hardware overlay on every recorded machine, and what must be true of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.golden import plans, presets
from trainer import families
from trainer.cli import main
from trainer.config.reading.presets import names

Outcomes = dict[str, dict[str, dict[str, str]]]
IMAGES = ("character", "style", "concept")
"""Presets of what pictures show; conversations have none."""


def refused(line: str) -> bool:
    return re.match(r"\d+: ", line) is not None


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return presets.outcomes(tmp_path_factory.mktemp("presets"))


@pytest.mark.parametrize("overlay", (presets.PLAIN, *presets.overlays()))
def test_outcomes_are_the_committed_ones(overlay: str, outcomes: Outcomes) -> None:
    committed: dict[str, Any] = json.loads(presets.GOLDEN.read_text())
    assert sorted(committed) == sorted(outcomes)
    assert outcomes[overlay] == committed[overlay], "run `make golden` and read the diff"


@pytest.mark.parametrize("overlay", presets.overlays())
def test_an_overlay_is_refused_nowhere_but_where_the_machine_is_too_small(
    overlay: str, outcomes: Outcomes
) -> None:
    """A machine that takes the family's own values takes the overlay's, or says that more does not fit."""
    for family, by_machine in outcomes[overlay].items():
        if overlay.rpartition("/")[2] in IMAGES and families.get(family).sample_kind == "conversation":
            continue
        for machine, line in by_machine.items():
            plain = outcomes[presets.PLAIN][family][machine]
            if refused(line) and not refused(plain):
                assert line.startswith("69: the run does not fit") and machine == "cpu", (family, line)


@pytest.mark.parametrize("machine", ["dgx-spark", "rtx-4090", "h200", "a100-80gb"])
def test_every_family_has_a_plan_with_every_overlay_on_gpus(machine: str, outcomes: Outcomes) -> None:
    without = [
        (overlay, family)
        for overlay, by_family in outcomes.items()
        for family, by_machine in by_family.items()
        if refused(by_machine[machine])
    ]
    conversations = [
        family for family in families.names() if families.get(family).sample_kind == "conversation"
    ]
    assert without == [(f"presets/{name}", family) for name in sorted(IMAGES) for family in conversations]


def test_low_vram_takes_less_than_the_family_by_itself(outcomes: Outcomes) -> None:
    def peak(overlay: str, family: str) -> float:
        return float(outcomes[overlay][family]["h200"].rpartition(", ")[2].partition(" of ")[0])

    for family in families.names():
        assert peak("presets/low-vram", family) < peak(presets.PLAIN, family), family


def test_the_overlays_that_are_promised() -> None:
    assert names() == ("character", "concept", "fast", "low-vram", "quality", "style")
    assert [name for name in presets.overlays() if name.startswith("hardware/")] == [
        "hardware/dgx-spark",
        "hardware/hopper-fp8",
        "hardware/rtx-4090",
    ]


def test_a_plan_names_the_preset_as_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TRAINER_PROFILE", "TRAINER_FACTS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "c.yaml").write_text(
        "family: flux1_dev\ndata: {sets: [{img_dir: x}]}\noutput_dir: out\nlora: {rank: 4, alpha: 4}\n"
    )
    facts = str(plans.MACHINES / "h200.json")
    assert main(["plan", "c.yaml", "--preset", "low-vram", "--set", "lora.rank=2", "--facts", facts]) == 0
    printed = capsys.readouterr()
    row = next(line for line in printed.out.splitlines() if line.startswith("activation_checkpointing"))
    assert row.split()[:2] == ["activation_checkpointing", "on"] and "preset low-vram" in row
    assert printed.err == (
        "note: preset low-vram: lora.alpha 8, not 4 (c.yaml:4)\n"
        "note: preset low-vram: not used: lora.rank (--set lora.rank)\n"
    )
