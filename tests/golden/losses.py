"""Losses of a fixed tiny run of every family and method."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import CASES, STEPS, Case, Workshop, keep_edits_small, numbers, small_samples

LOSSES = Path(__file__).parent / "losses"
TOLERANCE = 1e-5
"""Relative difference of losses that are the same: kernels of another CPU round differently."""
_PLAIN = (
    "validation.prompts=[]",
    "validation.held_out=0",
    "train.log_every_steps=1",
    f"train.max_train_steps={STEPS}",
)


def losses_of(case: Case, workshop: Workshop, folder: Path) -> list[float]:
    """The loss of every step of the small run, which is started in `folder`."""
    job = workshop.job(case, folder, *_PLAIN)
    job.train()
    return [row["loss"] for row in numbers(job.folder)]


def golden_path(case: Case) -> Path:
    """File of a case's committed losses."""
    return LOSSES / f"{case}.json"


def same_as(losses: Sequence[float]) -> Any:
    """A value that is equal to as many losses that differ from these by no more than TOLERANCE."""
    return pytest.approx(losses, rel=TOLERANCE)


def write_changed(path: Path, losses: Sequence[float]) -> bool:
    """Write losses into a file, unless it holds the same; gives whether they were written."""
    if path.exists() and losses == same_as(json.loads(path.read_text())):
        return False
    path.write_text(json.dumps(losses, indent=1) + "\n")
    return True


def write_losses(base: Callable[[str], Path], folder: Path) -> list[Path]:
    """Rewrite the golden files whose losses changed, working in the empty `folder`; gives these files."""
    workshop = Workshop(base=base, samples=small_samples(folder / "samples"), cache=folder / "cache")
    keep_edits_small(setattr)
    LOSSES.mkdir(exist_ok=True)
    found = {golden_path(case): losses_of(case, workshop, folder / str(case)) for case in CASES}
    return [path for path, losses in found.items() if write_changed(path, losses)]
