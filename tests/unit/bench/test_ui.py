"""Figures of the studio's measurement."""

from __future__ import annotations

import pytest

from bench.ui import COLUMNS, Measured, high


@pytest.mark.parametrize(("count", "wanted"), [(1, 1), (20, 19), (90, 86), (100, 95), (101, 96)])
def test_95_of_100_samples_are_not_above_the_high_one(count: int, wanted: int) -> None:
    found = high([float(one) for one in range(count, 0, -1)])
    assert found == wanted
    assert sum(one <= found for one in range(1, count + 1)) >= 0.95 * count


def measured(*samples: float, high_limit: float | None = None) -> Measured:
    return Measured(what="x", samples=samples, unit="ms", median_limit=50, high_limit=high_limit)


def test_both_limits_have_to_be_kept() -> None:
    assert measured(50, 50, 200).kept
    assert not measured(51, 51, 51).kept
    assert not measured(50, 50, 200, high_limit=100).kept
    assert measured(50, 50, 100, high_limit=100).kept


def test_a_row_has_a_cell_for_each_column() -> None:
    row = measured(40, 50, 120, high_limit=100).row
    assert row == ("x", "50 ms", "120 ms", "120 ms", "50 and 100 ms", "no")
    assert len(row) == len(COLUMNS)
