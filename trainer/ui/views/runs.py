"""Runs of the studio's root: those that run first, then by their last change."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError, TrainerError
from trainer.telemetry.runs import find_runs, is_run, read_run
from trainer.ui.studio import Studio, found_by_id, identifier
from trainer.ui.views.state import StateView, signature, state_view

FILTERS = ("all", "running", "ended")
_ROWS_KEPT = 4096


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run in the list."""

    id: str
    name: str
    """Its folder below the root."""
    state: StateView
    family: str
    method: str
    step: int
    steps: int | None
    loss: str
    held_out: str
    seconds_per_step: float | None
    seconds_left: float | None
    """Predicted by the median step so far; None where it does not train."""
    preview: tuple[int, int] | None
    """Step and number of its last preview."""
    changed_unix_seconds: float

    @property
    def percent(self) -> int:
        """Share of its steps that are done, up to 100."""
        return min(100, 100 * self.step // self.steps) if self.steps else 0


@dataclass(frozen=True, kw_only=True)
class RunsView:
    """The list of runs, and what could not be looked into."""

    rows: tuple[RunRow, ...]
    count: int
    """Runs without the filter."""
    notes: tuple[str, ...]
    words: str
    shown: str
    """One of FILTERS."""


def runs_view(studio: Studio, *, words: str = "", shown: str = FILTERS[0]) -> RunsView:
    """All runs below the root whose name or family has every one of `words`, and that are `shown`.

    A run that is damaged is a note.
    """
    notes: list[str] = []
    rows: list[RunRow] = []
    for folder in run_folders(studio, notes):
        try:
            rows.append(_row(studio.runs, folder, signature(folder)))
        except TrainerError as error:
            notes += map(str, error.problems)
    kept = [row for row in rows if _is_shown(row, words, shown)]
    kept.sort(key=lambda row: (row.state.ended, -row.changed_unix_seconds, row.name))
    return RunsView(rows=tuple(kept), count=len(rows), notes=tuple(notes), words=words, shown=shown)


def _is_shown(row: RunRow, words: str, shown: str) -> bool:
    text = f"{row.name} {row.family} {row.method} {row.state.word}".lower()
    wanted = shown == FILTERS[0] or row.state.ended == (shown == "ended")
    return wanted and all(word in text for word in words.lower().split())


@functools.lru_cache(maxsize=_ROWS_KEPT)
def _row(root: Path, folder: Path, changes: tuple[object, ...]) -> RunRow:
    """The row of a run, which is read anew when its `signature` has changed."""
    run = read_run(folder)
    status = run.statuses[0] if run.statuses else None
    pace = status.median_step_seconds if status else run.last.get("seconds_per_step")
    left = None
    if status and status.median_step_seconds and run.steps and run.health and run.health.healthy:
        left = max(0, run.steps - run.step) * status.median_step_seconds
    last = run.samples[-1] if run.samples else None
    first_of_last = next((one for one in run.samples if last and one.step == last.step), None)
    return RunRow(
        id=identifier(root, folder),
        name=name_of(root, folder),
        state=state_view(run),
        family=run.config.get("family", ""),
        method=run.config.get("method", ""),
        step=run.step,
        steps=run.steps,
        loss=run.figures["loss"],
        held_out=run.figures["held-out loss"],
        seconds_per_step=pace,
        seconds_left=left,
        preview=(first_of_last.step, first_of_last.number) if first_of_last else None,
        # none of a run that vanished at this moment
        changed_unix_seconds=max((one[0] for one in changes if isinstance(one, tuple)), default=0) / 1e9,
    )


def name_of(root: Path, folder: Path) -> str:
    """The name by which a run is shown: its folder below the root, or the root's own name."""
    relative = folder.relative_to(root).as_posix()
    return folder.name if relative == "." else relative


def has_page(studio: Studio, folder: Path) -> bool:
    """True for the folder of a run that is shown; one that still loads its base has no record."""
    try:
        return folder.is_relative_to(studio.runs) and is_run(folder)
    except PermissionError:
        return False


def run_folders(studio: Studio, notes: list[str] | None = None) -> list[Path]:
    """Folders of runs below the root, but in the studio's own; `notes` gets what is closed to us."""
    told: list[str] = [] if notes is None else notes
    try:
        found = find_runs(studio.runs, told.append, nested=True)
    except ConfigError:
        return []  # none yet
    return [folder for folder in found if not folder.is_relative_to(studio.folder)]


def run_folder(studio: Studio, run: str) -> Path:
    """The folder of the run with that id. Raises UnknownIdError."""
    return found_by_id(studio.runs, run, run_folders(studio))
