"""Tables of measurements as docs/benchmarks/*.json has them, which `python -m bench page` shows. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.machine.description import Machine


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Losses of several runs, for a plot."""

    steps: int
    """Steps that a point is the mean of."""
    losses: Mapping[str, tuple[float, ...]]
    """By run, as the first cell of a row names it."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One file of a measurement that is no training step: cells as they are printed."""

    title: str
    text: str
    machine: Machine
    command: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    curves: Curves | None = None


def to_json(table: Table) -> str:
    """Sorted keys, so that a diff shows what changed."""
    content = dataclasses.asdict(table)
    if table.curves is None:
        del content["curves"]
    return as_text(content)


def as_text(content: Mapping[str, object]) -> str:
    """The text of a record's file."""
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
