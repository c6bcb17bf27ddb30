"""Command line tests see no TRAINER_* variable of the machine they run on."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("TRAINER_"):
            monkeypatch.delenv(name)
