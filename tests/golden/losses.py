"""Losses of a fixed tiny run of every family and method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.contract.runs import CASES, Case, Workshop, keep_edits_small, numbers, small_samples

LOSSES = Path(__file__).parent / "losses"
_PLAIN = ("validation.prompts=[]", "validation.held_out=0", "train.log_every_steps=1")


def losses_of(case: Case, workshop: Workshop, folder: Path) -> list[float]:
    """The loss of every step of the small run, which is started in `folder`."""
    job = workshop.job(case, folder, *_PLAIN)
    job.train()
    return [row["loss"] for row in numbers(job.folder)]


def golden_path(case: Case) -> Path:
    """File of a case's committed losses."""
    return LOSSES / f"{case}.json"


def write_losses(base: Callable[[str], Path], folder: Path) -> list[Path]:
    """Rewrite every golden file, working in the empty `folder`; gives the files."""
    workshop = Workshop(base=base, samples=small_samples(folder / "samples"), cache=folder / "cache")
    keep_edits_small(setattr)
    LOSSES.mkdir(exist_ok=True)
    written = []
    for case in CASES:
        losses = losses_of(case, workshop, folder / str(case))
        golden_path(case).write_text(json.dumps(losses, indent=1) + "\n")
        written.append(golden_path(case))
    return written
