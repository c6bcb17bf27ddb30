"""The interval of a ratio of medians, against all resamples there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trainer.telemetry.figures import Ratio, ratio_of_medians, summed_up


def _all_medians(rounds: list[list[float]]) -> np.ndarray:
    """The median of every resample within rounds, each of them once."""
    each = [list(itertools.product(one, repeat=len(one))) for one in rounds]
    return np.array([np.median(np.concatenate(parts)) for parts in itertools.product(*each)])


def test_the_interval_is_that_of_all_resamples() -> None:
    ours, base = [[80.0, 83.0, 91.0], [82.0, 88.0, 84.0]], [[100.0, 104.0, 97.0], [99.0, 120.0, 101.0]]
    exact = np.sort((_all_medians(ours)[:, None] / _all_medians(base)[None, :]).ravel())
    found = ratio_of_medians(ours, base)
    assert found.value == pytest.approx(np.median(ours) / np.median(base))

    def share_below(value: float) -> tuple[float, float]:
        sides = [np.searchsorted(exact, value + shift, side="left") for shift in (-1e-9, 1e-9)]
        return sides[0] / len(exact), sides[1] / len(exact)

    # of 2,000 draws the share below a quantile is off by 0.0035 in the mean
    low, high = share_below(found.low), share_below(found.high)
    assert low[0] - 0.014 <= 0.025 <= low[1] + 0.014
    assert high[0] - 0.014 <= 0.975 <= high[1] + 0.014
    assert found.tells_apart


def test_rounds_keep_their_shares() -> None:
    """A slow round of few steps: drawn from all steps at once, its share would change from draw to draw."""
    rounds = [[100.0] * 6, [200.0] * 5]
    kept = ratio_of_medians(rounds, [[100.0] * 5])
    assert (kept.value, kept.low, kept.high) == (1.0, 1.0, 1.0) and not kept.tells_apart


def test_rounds_that_are_mixed_are_no_difference() -> None:
    """Two runs of one variant differ by more than their steps do: the interval alone would tell."""
    ours, base = [[100.0, 100.1] * 15, [101.0, 101.1] * 15], [[100.4, 100.5] * 15, [100.5, 100.6] * 15]
    mixed = ratio_of_medians(ours, base)
    assert not mixed.rounds_apart and not mixed.tells_apart
    apart = ratio_of_medians([one[:1] * 30 for one in ours], [[90.0] * 30, [99.9] * 30])
    assert apart.rounds_apart and apart.tells_apart


@pytest.mark.parametrize(("low", "high", "apart"), [(1.0, 1.1, False), (0.9, 1.0, False), (1.01, 1.1, True)])
def test_an_interval_that_ends_at_one_tells_nothing_apart(low: float, high: float, apart: bool) -> None:
    assert Ratio(value=1.0, low=low, high=high).tells_apart is apart


def test_the_same_draw_each_time_and_a_scale() -> None:
    ours, base = [[80.0, 83.0, 91.0]], [[100.0, 104.0, 97.0]]
    once, again = ratio_of_medians(ours, base), ratio_of_medians(ours, base)
    assert once == again
    doubled = ratio_of_medians(ours, base, scale=2.0)
    assert (doubled.value, doubled.low, doubled.high) == pytest.approx(
        (2 * once.value, 2 * once.low, 2 * once.high)
    )


def test_rounds_are_summed_up() -> None:
    found = summed_up([[3.0, 1.0], [10.0, 20.0, 30.0]])
    assert (found.median, found.fastest, found.slowest, found.steps) == (10.0, 1.0, 30.0, 5)
    assert found.round_medians == (2.0, 20.0)
