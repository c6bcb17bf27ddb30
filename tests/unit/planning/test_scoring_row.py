"""The plan's row on models that measure previews, and the memory that it says they take."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.scoring_models import write_clip, write_dinov2
from trainer import families
from trainer.config.reading.load import Loaded, load
from trainer.machine.reading import read_recorded
from trainer.planning.planning import plan_run
from trainer.planning.scoring_row import with_scoring

ROOT = Path(__file__).resolve().parents[3]
CPU_FACTS = ROOT / "tests" / "golden" / "machines" / "cpu.json"


def loaded(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Loaded:
    monkeypatch.chdir(ROOT)
    defaults = {name: families.get(name).defaults for name in families.names()}
    path = Path("train_configs/quickstart.yaml")
    return load([path], overrides=overrides, family_defaults=defaults, environ={})


def test_host_memory_is_that_of_the_larger_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip, dinov2 = write_clip(tmp_path / "clip"), write_dinov2(tmp_path / "dinov2")
    both = loaded(
        monkeypatch,
        "validation.metrics=[clip_t, dinov2]",
        f"validation.clip_model={clip}",
        f"validation.dinov2_model={dinov2}",
    )
    from transformers import AutoModel

    sizes = [
        sum(one.nbytes for one in AutoModel.from_pretrained(path).parameters()) for path in (clip, dinov2)
    ]
    plan = with_scoring(plan_run(both, read_recorded(CPU_FACTS)), both)
    assert plan.decisions[-1].value == "clip_t, dinov2"
    assert plan.decisions[-1].source == "--set validation.metrics"
    assert (plan.host_memory[-1].name, plan.host_memory[-1].bytes) == ("scoring", max(sizes))
    assert not plan.warnings
    small = dataclasses.replace(plan_run(both, read_recorded(CPU_FACTS)), budget_bytes=1000)
    assert "measuring previews takes" in with_scoring(small, both).warnings[-1]


def test_models_that_are_not_here_have_no_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    wanted = loaded(monkeypatch, "validation.metrics=[nearest_train]")
    before = plan_run(wanted, read_recorded(CPU_FACTS))
    plan = with_scoring(before, wanted)
    assert "facebook/dinov2-base" in plan.decisions[-1].reason and "clip" not in plan.decisions[-1].reason
    assert "sizes are known once they are on this disk" in plan.decisions[-1].reason
    assert plan.host_memory == before.host_memory
    none = loaded(monkeypatch)
    assert with_scoring(before, none) is before
