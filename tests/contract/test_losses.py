"""Losses of a fixed run against the committed ones: numerics that change are seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.runs import CASES, STEPS, Case, Workshop
from tests.golden.losses import LOSSES, golden_path, losses_of, same_as, write_changed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_are_the_committed_ones(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    expected = json.loads(golden_path(case).read_text())
    assert len(expected) == STEPS
    found = losses_of(case, workshop, tmp_path)
    assert found == same_as(expected), "run `make golden` and read the diff"


def test_no_golden_file_is_left_over() -> None:
    assert sorted(LOSSES.iterdir()) == sorted(golden_path(case) for case in CASES)


@pytest.mark.parametrize(
    ("losses", "written"),
    [([0.5, 2.0 + 1e-7], False), ([0.5, 2.0 + 1e-4], True), ([0.5], True), ([0.5, 2.0, 1.0], True)],
)
def test_a_golden_file_is_written_only_where_losses_changed(
    losses: list[float], written: bool, tmp_path: Path
) -> None:
    path = tmp_path / "losses.json"
    assert write_changed(path, [0.5, 2.0])
    before = path.read_text()
    assert write_changed(path, losses) == written
    assert (path.read_text() != before) == written
