"""Early stopping ends where a plain reading of the series of values says, and not before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.schema import EarlyStopSection
from trainer.engine.records import early_stop

Monitor = Literal["validation_loss", "clip_t"]
VALUES = st.lists(
    st.one_of(st.sampled_from([0.5, 0.25, 1.0]), st.floats(allow_nan=True, width=32)), max_size=12
)


def brute_force(values: Sequence[float], *, lower: bool, patience: int, delta: float) -> int | None:
    """Index of the first value at which the last `patience` ones are no better than the best before them.

    Looks at the whole series at each place, and keeps no count.
    """
    for end in range(1, len(values) + 1):
        best, best_at = None, -1
        for place, value in enumerate(values[:end]):
            gain = math.inf if best is None else (best - value if lower else value - best)
            if math.isfinite(value) and gain > delta:
                best, best_at = value, place
        if end - 1 - best_at >= patience:
            return end - 1
    return None


def ended_at(values: Sequence[float], settings: EarlyStopSection, *, pause: int = -1) -> int | None:
    """The same by the module, saved and read back as a checkpoint does after `pause` rounds."""
    patience = early_stop.Patience()
    rows = [{"step": 10 * place, settings.monitor: value} for place, value in enumerate(values)]
    for place, row in enumerate(rows):
        patience = early_stop.after_round(patience, row, settings)
        if place == pause:  # rows that were counted are read again on a resume
            patience = early_stop.after_rows(
                early_stop.Patience(**vars(patience)), rows[: place + 1], settings
            )
        if early_stop.reason(patience, settings, patience.last_step):
            return place
    return None


@given(
    values=VALUES,
    monitor=st.sampled_from(["validation_loss", "clip_t"]),
    patience=st.integers(1, 4),
    delta=st.sampled_from([0.0, 0.3]),
    pause=st.integers(-1, 11),
)
def test_it_ends_where_a_plain_reading_ends(
    values: list[float], monitor: Monitor, patience: int, delta: float, pause: int
) -> None:
    settings = EarlyStopSection(monitor=monitor, patience=patience, min_delta=delta)
    expected = brute_force(values, lower=monitor == "validation_loss", patience=patience, delta=delta)
    assert ended_at(values, settings, pause=pause) == expected


def test_another_metric_and_other_samples_begin_anew() -> None:
    settings = EarlyStopSection(patience=1)
    first = early_stop.after_round(
        early_stop.Patience(), {"step": 0, "validation_loss": 1.0, "validation_data": "a"}, settings
    )
    worse = {"step": 5, "validation_loss": 2.0}
    same = early_stop.after_round(first, {**worse, "validation_data": "a"}, settings)
    assert early_stop.reason(same, settings, same.last_step) == (
        "early stop at step 5: validation_loss never fell below 1 (step 0) in 1 round of validation"
    )
    other = early_stop.after_round(first, {**worse, "validation_data": "b"}, settings)
    assert other.best == 2.0 and not early_stop.reason(other, settings, other.last_step)
    clip = EarlyStopSection(monitor="clip_t", patience=1)
    assert not early_stop.reason(same, clip, same.last_step)
    assert early_stop.after_round(same, {"step": 10, "clip_t": 0.2}, clip).best == 0.2


def test_more_patience_goes_on_and_none_never_ends() -> None:
    settings = EarlyStopSection(patience=2)
    rows = [{"step": step, "validation_loss": 1.0} for step in range(4)]
    state = early_stop.after_rows(early_stop.Patience(), rows[:3], settings)
    assert early_stop.reason(state, settings, state.last_step)
    assert not early_stop.reason(state, EarlyStopSection(patience=3), state.last_step)
    assert not early_stop.reason(state, None, state.last_step)
    assert early_stop.after_rows(state, rows, None) == state


@pytest.mark.parametrize("value", [float("nan"), None])
def test_a_value_that_is_not_finite_is_told_as_such(value: float | None) -> None:
    settings = EarlyStopSection(patience=1)
    state = early_stop.after_round(early_stop.Patience(), {"step": 3, "validation_loss": value}, settings)
    assert "has not had a finite value" in early_stop.reason(state, settings, state.last_step)
