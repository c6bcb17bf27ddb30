"""Arguments of commands that have real runs of a tiny base."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def given(tiny_flux1_dev: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "cache"))
    record = ["--record", str(tmp_path / "record.json"), "--month", "2026-11"]
    return ["flux1_dev", "--base", str(tiny_flux1_dev), "--work", str(tmp_path), *record]
