"""`trainer runs`: settings, losses and results of the runs in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import GivenPath
from trainer.cli.output import say, shown_below_options
from trainer.cli.targets import require_picture
from trainer.errors import ConfigError, DataError, StorageError, one_line
from trainer.words.tables import aligned

if TYPE_CHECKING:
    from trainer.telemetry.runs import Run

_PATH = GivenPath()


@shown_below_options
@click.group()
def runs() -> None:
    """List and compare finished and running runs.
    \f
    Examples:
      trainer runs list runs
      trainer runs show runs/my-lora
      trainer runs compare runs/rank-16 runs/rank-32 --plot losses.png
      trainer runs list runs --csv > runs.csv
    """


def _shared(function: Callable[..., None]) -> Callable[..., None]:
    """Add the parameters of both commands: folders, as_csv and plot."""
    folders = click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=_PATH)
    as_csv = click.option("--csv", "as_csv", is_flag=True, help="Print CSV instead of a table.")
    plot = click.option("--plot", metavar="FILE", type=_PATH, help="Also draw the losses into this PNG.")
    return folders(as_csv(plot(function)))


@shown_below_options
@runs.command(name="list")
@_shared
def list_runs(folders: tuple[Path, ...], as_csv: bool, plot: Path | None) -> None:
    """One line for each run in these folders, or below them.
    \f
    Examples:
      trainer runs list runs
      trainer runs list /output --plot losses.png
    """
    found = _read(folders, passing_over=True)
    rows = [["run", *found[0].figures], *([str(run.folder), *run.figures.values()] for run in found)]
    _print(rows, as_csv=as_csv)
    _plot(found, plot)


@shown_below_options
@runs.command()
@click.argument("folder", metavar="RUN", type=_PATH)
@click.option("--csv", "as_csv", is_flag=True, help="Print the rounds of validation as CSV.")
def show(folder: Path, as_csv: bool) -> None:
    """Show one run: its figures, how it goes or ended, its files, and each round of validation.
    \f
    Examples:
      trainer runs show runs/my-lora
      trainer runs show runs/my-lora --csv > rounds.csv

    Metrics are those of validation.metrics, which `trainer score --help` explains.
    """
    from trainer.files import atomic
    from trainer.telemetry.runs import is_run

    with atomic.reading_told(folder):
        accepted = is_run(folder)
    if not accepted:
        remedy = "name the output_dir of one run; `trainer runs list` finds them below a folder"
        raise ConfigError("no run is in this folder", where=str(folder), remedy=remedy)
    (run,) = _read([folder], passing_over=False)
    names = dict.fromkeys(name for values in run.rounds.values() for name in values)
    rows = [["step", *names]]
    rows += [
        [str(step), *(f"{values[name]:.4g}" if name in values else "" for name in names)]
        for step, values in run.rounds.items()
    ]
    if not as_csv:
        _print([["run", str(run.folder)], *_shown(run)], as_csv=False)
        say(f"{run.early_stop}\n" if run.early_stop else "")
    if run.rounds:
        _print(rows, as_csv=as_csv)


@shown_below_options
@runs.command()
@_shared
def compare(folders: tuple[Path, ...], as_csv: bool, plot: Path | None) -> None:
    """Compare runs, a column each: settings that differ, then figures.
    \f
    Examples:
      trainer runs compare runs/rank-16 runs/rank-32
      trainer runs compare runs --csv > compared.csv
    """
    from trainer.telemetry.runs import differing_settings, labels

    found = _read(folders, passing_over=False)
    rows = [["", *labels(found)]]
    rows += [[key, *values] for key, values in differing_settings(found).items() if key != "output_dir"]
    rows += [[column, *(run.figures[column] for run in found)] for column in found[0].figures]
    _print(rows, as_csv=as_csv)
    _plot(found, plot)


@shown_below_options
@runs.command()
@click.argument("folder", metavar="RUN", type=_PATH)
@click.argument("order", metavar="ORDER", type=click.Choice(["save", "sample", "stop"]))
@click.option("--wait", is_flag=True, help="Return once it is done, or the run has ended.")
def control(folder: Path, order: str, wait: bool) -> int:
    """Ask a run that trains to `save` a checkpoint, to `sample` previews, or to `stop`.
    \f
    Examples:
      trainer runs control runs/my-lora save
      trainer runs control runs/my-lora sample --wait
      trainer runs control runs/my-lora stop

    It looks between two steps; training goes on after `save` and `sample`, and `stop` is as SIGTERM: the run
    saves and ends with 75. A run that still loads or encodes comes to `save` and `sample` when it trains.
    """
    from trainer.queue.beside import stop_run
    from trainer.telemetry.control import Order, answered, ask

    asked = stop_run(folder) if order == Order.STOP else ask(folder, Order(order))
    say(f"asked {folder} to {order}", err=True)
    if wait:
        found = answered(folder, asked)
        stops = order == Order.STOP
        without = "stop: the run has ended" if stops else "the run ended before"
        say(f"{order}: done at step {found.step}: {found.done}" if found else without)
        return 0 if found or stops else 1
    return 0


def _shown(run: Run) -> list[list[str]]:
    """Rows of `trainer runs show`: figures, how the run goes or ended, checkpoints and LoRA files."""
    from trainer.words.sizes import GIB

    rows = dict(run.figures)
    if run.health is not None:
        rows["now"] = run.health.reason
    if run.end is not None:
        rows["exit"] = f"{rows['exit']}: {run.end.meaning}"
        rows["cause"] = run.end.cause
    if run.checkpoints:
        names = ", ".join(one.folder.name for one in run.checkpoints)
        rows["checkpoints"] = f"{names} ({sum(one.bytes for one in run.checkpoints) / GIB:.3g} GiB)"
    shown = [[name, value] for name, value in rows.items() if value]
    loras = [file.path for one in run.checkpoints for file in one.lora]
    loras += [file.path for file in run.files if file.path.match("lora/*.safetensors")]
    return [*shown, *(["LoRA file", str(path.relative_to(run.folder))] for path in loras)]


def _read(folders: Sequence[Path], *, passing_over: bool) -> list[Run]:
    """The runs of these folders; damaged ones are told, and with `passing_over` do not hide the others."""
    from trainer.telemetry.runs import find_runs, read_run

    paths = dict.fromkeys(path for folder in folders for path in find_runs(folder, _tell))
    found: list[Run] = []
    damaged: list[DataError | StorageError] = []
    for path in paths:
        try:
            found.append(read_run(path))
        except (DataError, StorageError) as error:
            damaged.append(error)
            continue
        if found[-1].damaged_lines:
            _tell(f"{path}: {found[-1].damaged_lines} damaged lines of its metrics are left out")
    if damaged and not (passing_over and found):
        raise damaged[0]
    for problem in damaged:
        _tell(str(problem))
    return found


def _tell(text: str) -> None:
    say(f"warning: {text}", err=True)


def _print(rows: Sequence[Sequence[str]], *, as_csv: bool) -> None:
    """Print a table: CSV, or columns as wide as their widest cell."""
    import csv
    import io

    if as_csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        click.echo(text.getvalue(), nl=False)
        return
    for line in aligned([[one_line(cell) for cell in row] for row in rows]):
        say(line)


def _plot(found: Sequence[Run], path: Path | None) -> None:
    from trainer.telemetry.curves import write_curves

    if path is None:
        return
    if not any(run.losses or run.held_out for run in found):
        raise ConfigError("no run has a loss yet", where="--plot", remedy="wait for its first log step")
    require_picture(path, "--plot")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_curves(found, path)
    say(f"plot: {path}", err=True)
