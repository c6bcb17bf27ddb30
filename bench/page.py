"""Write docs/benchmarks.md and its plots from docs/benchmarks/*.json and notes.md. No torch.

python -m bench page
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import arguments as types
from bench.processes import REPOSITORY
from bench.record import FOLDER, Record, Row, read_records
from trainer.errors import DataError
from trainer.files import atomic
from trainer.machine.description import Machine
from trainer.telemetry.measurement import Table
from trainer.words.tables import markdown

PAGE = REPOSITORY / "docs" / "benchmarks.md"
IMAGES = REPOSITORY / "docs" / "images"
MARK = "<!-- records -->"
"""The line of notes.md where the records' sections go."""
_BASELINE = "diffusers"
_HEAD = """<!-- Written by `make docs` from the records and notes.md in docs/benchmarks; edit those. -->

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and the plots."""
    parser = types.command_parser("page", __doc__)
    parser.add_argument("--records", type=Path, default=FOLDER, help="folder of records and notes.md")
    parser.add_argument("--output", type=types.new_file, default=PAGE)
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--no-plots", action="store_true", help="write the text only")
    options = parser.parse_args(arguments)
    records = read_records(options.records)
    atomic.write_text(options.output, page(records, _notes(options.records / "notes.md")))
    if not options.no_plots:
        from bench.plots import write_plots

        write_plots(records, options.images)
    return 0


def _notes(path: Path) -> str:
    if not path.is_file():
        raise DataError(
            "there is no such file",
            where=str(path),
            remedy=f"write the page's own text there, with a line {MARK} for the records",
        )
    return path.read_text(encoding="utf-8")


def page(records: Mapping[str, Record | Table], notes: str) -> str:
    """The page's text. Raises DataError where notes.md has no line for the records."""
    before, mark, after = notes.partition(MARK)
    if not mark:
        raise DataError(f"it has no line {MARK}", where="notes.md", remedy="add it where the records go")
    sections = [_section(stem, record) for stem, record in records.items()]
    return _HEAD + before + "\n".join(sections).rstrip("\n") + after


def curves_name(stem: str) -> str:
    """File name of the plot of a record's losses."""
    return f"bench-{stem}-losses.png"


def scaling_name(stem: str) -> str:
    """File name of the plot of a record's numbers of GPUs."""
    return f"bench-{stem}-scaling.png"


def scaled(record: Record | Table) -> bool:
    """True where a table has steps of more than two GPUs beside one GPU's."""
    if not isinstance(record, Table) or not {"GPUs", "of one", "way"} <= set(record.columns):
        return False
    number, of_one = map(record.columns.index, ("GPUs", "of one"))
    several = [row for row in record.rows if int(row[number]) > 1]
    return any(int(row[number]) > 2 for row in several) and any(row[of_one] for row in several)


def plotted(record: Record | Table) -> bool:
    """True where a record has at least two bars to compare."""
    return isinstance(record, Record) and sum(row.milliseconds is not None for row in record.rows) > 1


def plot_names(stem: str) -> tuple[str, str]:
    """File names of a record's plots: time, and memory against time."""
    return f"bench-{stem}-time.png", f"bench-{stem}-memory.png"


def _section(stem: str, record: Record | Table) -> str:
    parts = [f"## {record.title}", f"{_machine(record.machine)}\n`{record.command}`"]
    if isinstance(record, Table):
        parts.append(markdown(record.columns, record.rows).rstrip())
        if record.curves is not None:
            parts.append(f"![Losses](images/{curves_name(stem)})")
        if scaled(record):
            parts.append(f"![Work of several GPUs](images/{scaling_name(stem)})")
    else:
        parts[-1] += _setup(record.rows)
        parts.append(_rows_table(record))
        parts += [text for text in (_problems(record.rows), _rates(record)) if text]
    if record.text:
        parts.insert(2, record.text)
    if plotted(record):
        time, memory = plot_names(stem)
        parts.append(f"![Time of a step](images/{time})\n![Memory against time](images/{memory})")
    return "\n\n".join(parts) + "\n"


def _machine(machine: Machine) -> str:
    gpu = f"{machine.gpu} ({machine.gpu_gib} GiB), driver {machine.driver}, " if machine.gpu else ""
    cpu = f"{machine.cpu_cores} CPU cores, {machine.architecture}"
    software = ", ".join(text for text in (f"torch {machine.torch}", machine.packages) if text)
    return f"Machine: {gpu}{cpu}, {software}; {machine.month}."


_SETUP: Mapping[str, Callable[[Row], str]] = {
    "px": lambda row: f"{row.resolution:,}" if row.resolution else "",
    "batch": lambda row: str(row.batch),
    "rank": lambda row: str(row.rank),
    "text tokens": lambda row: f"{row.tokens:,}" if row.tokens else "",
}


def _setup(rows: Sequence[Row]) -> str:
    """The settings that all rows have in common, in parentheses."""
    common = {name: cell(rows[0]) for name, cell in _SETUP.items() if len(set(map(cell, rows))) == 1}
    texts = [
        f"{name} {value}" if name in ("batch", "rank") else f"{value} {name}"
        for name, value in common.items()
        if value
    ]
    return f"\n({', '.join(texts)})" if texts else ""


def _rows_table(record: Record) -> str:
    """The table of all rows; a column that would be empty is left out."""
    rows = record.rows
    fastest = {row.family: row.milliseconds for row in rows if row.variant == _BASELINE}

    def against(row: Row) -> str:
        base = fastest.get(row.family)
        return f"{base / row.milliseconds:.2f}x" if base and row.milliseconds else ""

    def number(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:,.{digits}f}"

    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f} %"

    columns: dict[str, Callable[[Row], str]] = {
        "family": lambda row: f"`{row.family}`",
        "variant": lambda row: row.variant,
        "frozen layers multiply in": lambda row: row.precision,
        "settings": lambda row: row.settings,
        **{name: cell for name, cell in _SETUP.items() if len(set(map(cell, rows))) > 1},
        "ms/step (fastest to slowest)": _time,
        "samples/s": lambda row: number(row.samples_per_second, 2),
        "peak GiB allocated": lambda row: number(row.allocated_gib),
        "reserved": lambda row: number(row.reserved_gib),
        "planned": lambda row: number(row.planned_gib),
        "in use, by the driver": lambda row: number(row.device_gib),
        "host GiB": lambda row: number(row.host_gib),
        "first step, s (each round)": lambda row: ", ".join(number(one, 0) for one in row.first_steps),
        "GPU busy": lambda row: percent(row.busy_fraction),
        "copies": lambda row: percent(row.copy_share),
        "floor, ms": lambda row: number(row.floor_milliseconds, 0),
        "floor/time": lambda row: percent(row.share_of_floor),
        f"faster than {_BASELINE} by": lambda row: "" if row.variant == _BASELINE else against(row),
    }
    filled = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    if len(set(filled["family"])) == 1:
        del filled["family"]
    filled = {name: cells for name, cells in filled.items() if any(cells)}
    return markdown(list(filled), zip(*filled.values(), strict=True)).rstrip()


def _time(row: Row) -> str:
    if row.milliseconds is None:
        return row.problem
    spread = "" if row.fastest is None else f" ({_short(row.fastest)} to {_short(row.slowest)})"
    return _short(row.milliseconds) + spread


def _short(value: float | None) -> str:
    """Three digits or more, and no more than were measured."""
    if value is None:
        return "?"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _problems(rows: Sequence[Row]) -> str:
    """A sentence about rounds that do not agree; empty where all do."""
    apart = [row for row in rows if len(row.round_medians) > 1 and _drift(row) > 0.03]
    texts = [f"{row.variant} {', '.join(map(_short, row.round_medians))} ms" for row in apart]
    return f"Medians of the rounds that differ by more than 3 %: {'; '.join(texts)}." if texts else ""


def _drift(row: Row) -> float:
    return max(row.round_medians) / min(row.round_medians) - 1


def _rates(record: Record) -> str:
    if not record.ceilings or all(row.floor_milliseconds is None for row in record.rows):
        return ""
    rates = ", ".join(f"{name} {rate:g}" for name, rate in sorted(record.ceilings.items()))
    return f"Floor: the step's products at the rates of single kernels ({rates} TFLOP/s), and nothing else."
