"""Runs of the studio's root, newest first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError
from trainer.telemetry.runs import find_runs
from trainer.ui.studio import Studio, found_by_id, identifier


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run in the list."""

    id: str
    name: str


@dataclass(frozen=True, kw_only=True)
class RunsView:
    """The list of runs, and what could not be looked into."""

    rows: tuple[RunRow, ...]
    notes: tuple[str, ...]


def runs_view(studio: Studio) -> RunsView:
    """All runs below the root."""
    notes: list[str] = []
    rows = tuple(
        RunRow(id=identifier(studio.runs, folder), name=folder.relative_to(studio.runs).as_posix())
        for folder in run_folders(studio, notes)
    )
    return RunsView(rows=rows, notes=tuple(notes))


def run_folders(studio: Studio, notes: list[str] | None = None) -> list[Path]:
    """Folders of runs below the root, but in the studio's own; `notes` gets what is closed to us."""
    told: list[str] = [] if notes is None else notes
    try:
        found = find_runs(studio.runs, told.append)
    except ConfigError:
        return []  # none yet
    return [folder for folder in found if not folder.is_relative_to(studio.folder)]


def run_folder(studio: Studio, run: str) -> Path:
    """The folder of the run with that id. Raises UnknownIdError."""
    return found_by_id(studio.runs, run, run_folders(studio))
