"""Records of measurements: docs/benchmarks/*.json, from which docs/benchmarks.md is written. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.processes import REPOSITORY
from trainer.errors import DataError
from trainer.files import atomic
from trainer.machine.description import Machine
from trainer.telemetry import figures, measurement
from trainer.telemetry.measurement import Curves, Table

FOLDER = REPOSITORY / "docs" / "benchmarks"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant of a step. None: not measured. Memory is peak GiB, `host` that of the training process."""

    variant: str
    family: str
    precision: str
    """Precision in which frozen layers multiply: bf16, fp8, int8."""
    settings: str
    """Further differences from the other rows, for people; may be empty."""
    resolution: int
    """Pixels; 0 for a language model."""
    batch: int
    rank: int
    tokens: int
    """Text tokens of a sample; tokens of a row for a language model."""
    milliseconds: float | None = None
    """Median over all steps of all rounds; one step is `batch` samples."""
    fastest: float | None = None
    slowest: float | None = None
    steps: int = 0
    round_medians: tuple[float, ...] = ()
    samples_per_second: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    planned_gib: float | None = None
    host_gib: float | None = None
    device_gib: float | None = None
    """Most device memory that the driver showed in use, from start to end, encoding included."""
    first_steps: tuple[float, ...] = ()
    """Seconds from the start of the command to the first step's line in the log, round by round."""
    busy_fraction: float | None = None
    """Union of kernel times over wall time, from a profile of further steps."""
    copy_share: float | None = None
    floor_milliseconds: float | None = None
    problem: str = ""
    """The reason why there are no figures; empty where there are."""

    @property
    def share_of_floor(self) -> float | None:
        """Floor over measured time: 1.0 would be nothing but products at their measured rates."""
        if self.floor_milliseconds is None or self.milliseconds is None:
            return None
        return self.floor_milliseconds / self.milliseconds


@dataclass(frozen=True, kw_only=True)
class Record:
    """One file: rows that were measured together, alternating on one machine."""

    title: str
    text: str
    """Paragraphs above the table, as Markdown."""
    machine: Machine
    command: str
    rows: tuple[Row, ...]
    ceilings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Rates that the floors were computed with, 1e12 operations a second."""


def merge(row: Row, samples: Sequence[Mapping[str, Any]]) -> Row:
    """`row` with the figures of its rounds, each what one process printed, or with the problem of one."""
    problems = [str(sample["problem"]) for sample in samples if sample.get("problem")]
    if problems or not samples:
        return dataclasses.replace(row, problem=problems[0] if problems else "not run")
    times = figures.summed_up([list(map(float, sample["times"])) for sample in samples])
    firsts = [sample.get("first_step_seconds") for sample in samples]
    largest: dict[str, Any] = {name: _largest(samples, name, digits) for name, digits in _LARGEST.items()}
    return dataclasses.replace(
        row,
        milliseconds=round(times.median, 1),
        fastest=round(times.fastest, 1),
        slowest=round(times.slowest, 1),
        steps=times.steps,
        round_medians=tuple(round(one, 1) for one in times.round_medians),
        samples_per_second=round(1e3 * row.batch / times.median, 2),
        first_steps=tuple(round(float(first), 1) for first in firsts if first is not None),
        settings=next((str(sample["settings"]) for sample in samples if "settings" in sample), row.settings),
        **largest,
    )


_LARGEST = {
    **dict.fromkeys(("allocated_gib", "reserved_gib", "planned_gib", "host_gib", "device_gib"), 1),
    **{"busy_fraction": 3, "copy_share": 4},
}
"""Figures of which the largest of all rounds counts, with their digits."""


def _largest(samples: Sequence[Mapping[str, Any]], key: str, digits: int) -> float | None:
    values = [float(sample[key]) for sample in samples if sample.get(key) is not None]
    return round(max(values), digits) if values else None


def to_json(record: Record | Table) -> str:
    """Sorted keys, so that a diff shows what changed; values that were not measured are left out."""
    if isinstance(record, Table):
        return measurement.to_json(record)
    content = dataclasses.asdict(record)
    content["rows"] = [
        {key: value for key, value in row.items() if value not in (None, ())} for row in content["rows"]
    ]
    return measurement.as_text(content)


def update_table(
    path: Path,
    rows: Sequence[tuple[str, ...]],
    *,
    keys: int,
    title: str,
    where: Machine,
    command: str,
    columns: tuple[str, ...],
    order: Sequence[tuple[str, ...]] | None = None,
) -> None:
    """Write a table with these rows in the place of those whose first `keys` cells are equal; other rows, the
    title and the text of the file stay. With `order` only rows that it has, in that order.

    Raises DataError where rows would stay that another machine measured, or other versions: a record names
    one for all. Of several months it names the first and the last.
    """
    text, there, known = "", where, dict[tuple[str, ...], tuple[str, ...]]()
    if path.is_file():
        written = from_json(path.read_text(encoding="utf-8"), str(path))
        assert isinstance(written, Table), path
        title, text, there = written.title, written.text, written.machine
        cells = [dict(zip(written.columns, row, strict=True)) for row in written.rows]
        rows_there = [tuple(row.get(name, "") for name in columns) for row in cells]
        known = {row[:keys]: row for row in rows_there}
    new = {row[:keys]: row for row in rows}
    known |= new
    kept = [key for key in (known if order is None else order) if key in known]
    if stay := [key for key in kept if key not in new]:
        where = _of_both(there, where, path, len(stay))
    content = tuple(known[key] for key in kept)
    table = Table(title=title, text=text, machine=where, command=command, columns=columns, rows=content)
    atomic.write_text(path, to_json(table))


def _of_both(there: Machine, here: Machine, path: Path, stay: int) -> Machine:
    """The machine of `stay` rows of the record and of new ones. Raises DataError where these differ."""
    theirs, ours = dataclasses.asdict(there), dataclasses.asdict(here)
    months = sorted({*theirs.pop("month").split(" to "), *ours.pop("month").split(" to ")})
    if differ := [name for name in ours if ours[name] != theirs[name]]:
        name = differ[0]
        raise DataError(
            f"{stay} of its rows were not measured again, and they are of another machine or other versions:"
            f" {name} {theirs[name]!r}, and {ours[name]!r} here",
            where=str(path),
            remedy="name another file by --record; what was measured now is printed above",
        )
    return dataclasses.replace(here, month=" to ".join(dict.fromkeys((months[0], months[-1]))))


def from_json(text: str, where: str) -> Record | Table:
    """The record that `to_json` wrote, or a table of another command. Raises DataError naming `where`."""
    try:
        content = json.loads(text)
        machine = Machine(**content.pop("machine"))
        if "columns" in content:
            cells = tuple(tuple(map(str, row)) for row in content.pop("rows"))
            curves = content.pop("curves", None)
            if curves is not None:
                # in the order of the rows, whose first cells are the runs: JSON has them by name
                known = {name: tuple(map(float, one)) for name, one in curves["losses"].items()}
                drawn = {row[0]: known[row[0]] for row in cells if row[0] in known}
                curves = Curves(steps=int(curves["steps"]), losses=drawn)
            content["columns"] = tuple(content["columns"])
            return Table(**content, rows=cells, machine=machine, curves=curves)
        rows = tuple(
            Row(**{**row, **{name: tuple(row.get(name, ())) for name in ("round_medians", "first_steps")}})
            for row in content.pop("rows")
        )
        return Record(**content, rows=rows, machine=machine)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"it is not a record of measurements: {type(error).__name__}: {error}",
            where=where,
            remedy="`python -m bench train --record` writes them; keep other files elsewhere",
        ) from error


def read_records(folder: Path = FOLDER) -> dict[str, Record | Table]:
    """All records of a folder by the stem of their file, in its order. Raises DataError as `from_json`."""
    if not folder.is_dir():
        raise DataError(
            "there is no such folder",
            where=str(folder),
            remedy=f"the records are in {FOLDER.relative_to(REPOSITORY)}",
        )
    return {
        path.stem: from_json(path.read_text(encoding="utf-8"), str(path))
        for path in sorted(folder.glob("*.json"))
    }
