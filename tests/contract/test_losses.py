"""Losses of a fixed run against the committed ones: numerics that change are seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.runs import CASES, STEPS, Case, Workshop
from tests.golden.losses import LOSSES, golden_path, losses_of


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_are_the_committed_ones(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    """To 1e-5: kernels of another CPU round differently."""
    expected = json.loads(golden_path(case).read_text())
    assert len(expected) == STEPS
    found = losses_of(case, workshop, tmp_path)
    assert found == pytest.approx(expected, rel=1e-5), "run `make golden` and read the diff"


def test_no_golden_file_is_left_over() -> None:
    assert sorted(LOSSES.iterdir()) == sorted(golden_path(case) for case in CASES)
