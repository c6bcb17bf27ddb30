"""plan.json of a run's folder as it was written, by this trainer or an older one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAN_FILE = "plan.json"
STEPS = "steps"
"""Row with the optimizer steps of a run whose length is written in epochs, which the run counted."""
_MOST_BYTES = 1 << 22
_MEMORY = {"train": "train_memory", "cache": "cache_memory", "host": "host_memory"}


@dataclass(frozen=True)
class PlannedDecision:
    """A row of the plan's table."""

    feature: str
    value: str
    source: str
    reason: str


@dataclass(frozen=True)
class PlannedMemory:
    """A predicted component of memory."""

    name: str
    bytes: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class RecordedPlan:
    """The plan that a run began with."""

    device: str
    """`cuda` or `cpu`; empty where it is not recorded."""
    decisions: tuple[PlannedDecision, ...]
    memory: Mapping[str, tuple[PlannedMemory, ...]]
    """Components by kind: `train` and `cache` on the device, `host` beside it."""
    budget_bytes: int
    """Device memory that the plan keeps within."""
    disk_bytes: int
    """Free space that the run needs in its folder."""
    step_milliseconds: float
    """Predicted time of a micro-batch; 0.0 where the machine's rates are unknown."""
    accumulation_steps: int
    """Micro-batches of an optimizer step, which `ranks` processes share."""
    ranks: int
    warnings: tuple[str, ...]

    @property
    def step_seconds(self) -> float | None:
        """Predicted time of an optimizer step; None where the machine's rates are unknown."""
        return self.step_milliseconds * self.accumulation_steps / self.ranks / 1e3 or None

    def decision(self, feature: str) -> PlannedDecision | None:
        """The row of a feature; None without one."""
        return next((row for row in self.decisions if row.feature == feature), None)


def read_plan(run_dir: Path) -> RecordedPlan | None:
    """The plan of a run's folder; None without one, and where it is damaged. What a version did not record is
    empty.
    """
    try:
        with (run_dir / PLAN_FILE).open("rb") as file:
            raw = json.loads(file.read(_MOST_BYTES))
        return _plan(raw) if isinstance(raw, dict) else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _plan(raw: Mapping[str, Any]) -> RecordedPlan:
    """Raises TypeError, ValueError or AttributeError where a value is of another type than a plan's."""
    decisions = (
        PlannedDecision(*(str(row.get(name, "")) for name in ("feature", "value", "source", "reason")))
        for row in raw.get("decisions", ())
    )
    memory = {
        kind: tuple(
            PlannedMemory(str(row.get("name", "")), int(row.get("bytes", 0)), str(row.get("detail", "")))
            for row in raw.get(name, ())
        )
        for kind, name in _MEMORY.items()
    }
    return RecordedPlan(
        device=str(raw.get("device", "")),
        decisions=tuple(decisions),
        memory=memory,
        budget_bytes=int(raw.get("budget_bytes", 0)),
        disk_bytes=int(raw.get("disk_bytes", 0)),
        step_milliseconds=float(raw.get("step_milliseconds", 0.0)),
        accumulation_steps=int(raw.get("accumulation_steps", 1)),
        ranks=max(1, int(raw.get("ranks", 1))),
        warnings=tuple(map(str, raw.get("warnings", ()))),
    )
