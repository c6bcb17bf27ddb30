"""A queue on a machine with two fake GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.queue.fakes import FakeLocal, FakeMachine


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine(("GPU-a", "GPU-b"))


@pytest.fixture
def queue(tmp_path: Path, machine: FakeMachine) -> FakeLocal:
    return FakeLocal(tmp_path / "queue", machine)
