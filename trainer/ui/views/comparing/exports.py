"""Comparisons to take away as CSV, and the records of `trainer compare` below the root of runs."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.telemetry.runs import Run, is_run
from trainer.telemetry.sinks.records import SCORES
from trainer.ui.opened import open_below
from trainer.ui.studio import Studio, UnknownIdError
from trainer.ui.views.comparing.compare import CompareView
from trainer.ui.views.comparing.curves import hours
from trainer.ui.views.runs import name_of

NUMBERS = (
    "loss", "validation_loss", "learning_rate", "grad_norm", "seconds_per_step", "samples_per_second",
    "tokens_per_second", "device_memory_reserved_peak_bytes", *SCORES,
)  # fmt: skip
"""Columns of the CSV of all lines, by their name in metrics.jsonl."""
_FORMULA = re.compile(r"[=+\-@\t\r]")
_RECORD_BYTES, _MOST_RECORDS, _MOST_CELLS = 1 << 20, 20, 40


@dataclass(frozen=True, kw_only=True)
class Record:
    """A table that `trainer compare --json` wrote."""

    name: str
    """Its file below the root of runs."""
    title: str
    text: str
    machine: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table_csv(view: CompareView) -> str:
    """Settings that differ, figures, predictions and metrics as CSV, a column a run."""
    rows = [["", *(run.name for run in view.runs)]]
    tables = (view.settings, view.decisions, view.figures, view.metrics)
    rows += [[row.name, *row.cells] for table in tables for row in table]
    for number, one in enumerate(view.runs[0].compared):
        for which in ("predicted", "measured"):
            values = [vars(run.compared[number])[which] for run in view.runs]
            cells = ("" if value is None else f"{value:.6g}" for value in values)
            rows.append([f"{one.name}, {which}, {one.unit}", *cells])
    return _csv(rows)


def numbers_csv(studio: Studio, runs: Sequence[Run]) -> str:
    """Every line of the runs' metrics as CSV: run, step, hours of steps, and NUMBERS as they were written."""
    rows = [["run", "step", "hours", *NUMBERS]]
    for run in runs:
        times, name = dict(hours(run)), name_of(studio.runs, run.folder)
        for row in run.rows:
            values = [row.get(key) for key in NUMBERS]
            if any(value is not None for value in values):
                time = f"{times[row['step']]:.6g}" if row["step"] in times else ""
                cells = ("" if value is None else repr(value) for value in values)
                rows.append([name, str(row["step"]), time, *cells])
    return _csv(rows)


def _csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows([_plain(cell) for cell in row] for row in rows)
    return text.getvalue()


def _plain(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula: numbers stay, other texts get an apostrophe."""
    if not _FORMULA.match(cell):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def records(studio: Studio) -> list[Record]:
    """Records of `trainer compare` right below the root of runs, or in a folder there, newest first.

    At most 20; files that are none are left out.
    """
    found: list[Record] = []
    for path in _files(studio.runs):
        if len(found) == _MOST_RECORDS:
            break
        try:
            with open_below(studio.runs, path) as file:
                raw = json.loads(file.read(_RECORD_BYTES))
            found.append(_record(path.relative_to(studio.runs).as_posix(), raw))
        except (UnknownIdError, ValueError, TypeError, KeyError, RecursionError):
            continue
    return found


def _files(root: Path) -> list[Path]:
    """JSON files that may be records, newest first; those of runs are not."""
    try:
        inner = [one for one in root.iterdir() if one.is_dir() and not one.is_symlink() and not is_run(one)]
        paths = [path for folder in (root, *inner) for path in folder.glob("*.json")]
        return sorted(paths, key=lambda path: path.lstat().st_mtime_ns, reverse=True)
    except OSError:  # a folder that is closed or gone: the page of runs tells of it
        return []


def _record(name: str, raw: object) -> Record:
    """Raises TypeError, ValueError or KeyError for what is no such table."""
    if not isinstance(raw, dict) or not str(raw["command"]).startswith("trainer compare"):
        raise ValueError(name)
    machine = raw["machine"]
    columns = tuple(str(one) for one in raw["columns"])[:_MOST_CELLS]
    return Record(
        name=name,
        title=str(raw["title"]),
        text=str(raw["text"]),
        machine=str(machine["gpu"]) or f"{machine['cpu_cores']} cores of a CPU",
        columns=columns,
        rows=tuple(tuple(str(cell) for cell in row[: len(columns)]) for row in raw["rows"]),
    )
