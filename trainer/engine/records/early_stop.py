"""Early stopping by patience: rounds of validation without a better value of one metric.

Source: `EarlyStopping` of Keras, whose rule for `min_delta` this is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.schema import EarlyStopSection
from trainer.words.plurals import numbered

LOWER_IS_BETTER = frozenset({"validation_loss", "kid"})
"""Metrics of which a smaller value is the better one; of all others a larger one is."""
DATA_OF = {"validation_loss": "validation_data"}
"""Key of a row of metrics.jsonl that says what a metric was measured on; `score_data` for all others."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The rounds of one metric so far, as checkpoints record them."""

    monitor: str = ""
    data: str = ""
    """Hash of what the metric was measured on: values with unequal hashes do not compare."""
    best: float | None = None
    """None before the first finite value."""
    best_step: int = 0
    last_step: int = -1
    """Step of the last round; rounds up to it are not counted again."""
    rounds: int = 0
    """Rounds since the best one."""


def after_round(patience: Patience, row: Mapping[str, Any], settings: EarlyStopSection | None) -> Patience:
    """The rounds with that of a row of metrics.jsonl; unchanged where the row has no new value of the metric.

    Another metric, or one measured on other samples, begins anew. A value that is not finite is no better.
    """
    if settings is None or settings.monitor not in row or row["step"] <= patience.last_step:
        return patience
    monitor, step, value = settings.monitor, row["step"], row[settings.monitor]
    data = str(row.get(DATA_OF.get(monitor, "score_data"), ""))
    if (patience.monitor, patience.data) != (monitor, data):
        patience = Patience(monitor=monitor, data=data)
    finite = value is not None and math.isfinite(value)
    if finite and (patience.best is None or _gain(monitor, patience.best, value) > settings.min_delta):
        return dataclasses.replace(patience, best=value, best_step=step, last_step=step, rounds=0)
    return dataclasses.replace(patience, last_step=step, rounds=patience.rounds + 1)


def _gain(monitor: str, best: float, value: float) -> float:
    return best - value if monitor in LOWER_IS_BETTER else value - best


def after_rows(
    patience: Patience, rows: Iterable[Mapping[str, Any]], settings: EarlyStopSection | None
) -> Patience:
    """The rounds with all rows of metrics.jsonl, oldest first, that they do not hold yet."""
    for row in rows:
        patience = after_round(patience, row, settings)
    return patience


def reason(patience: Patience, settings: EarlyStopSection | None, step: int) -> str:
    """Why training ends after `step`, in words; empty where it goes on."""
    if settings is None or patience.monitor != settings.monitor or patience.rounds < settings.patience:
        return ""
    worse = "fell below" if settings.monitor in LOWER_IS_BETTER else "rose above"
    delta = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
    rounds = f"{numbered(patience.rounds, 'round')} of validation"
    best = "a finite value" if patience.best is None else f"{patience.best:.4g} (step {patience.best_step})"
    verb = f"has not had {best}" if patience.best is None else f"never {worse} {best}{delta}"
    return f"early stop at step {step}: {settings.monitor} {verb} in {rounds}"
