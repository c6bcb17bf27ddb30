"""Runs beside each other: settings that differ, curves, previews at one step, speed, memory and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer.telemetry.run_folder.results import Sample
from trainer.telemetry.runs import Run, differing_settings, read_run
from trainer.telemetry.sinks.records import SCORES
from trainer.ui.opened import open_below
from trainer.ui.studio import Studio, found_by_id, identifier
from trainer.ui.views.comparing.curves import OVER, Curve, Drawing, curve, drawing
from trainer.ui.views.job import Compared, compared
from trainer.ui.views.runs import name_of, run_folders
from trainer.ui.views.state import StateView, state_view

FEWEST, MOST = 2, 6
"""Number of runs that can be compared."""
METRICS = {"validation_loss": "held-out loss", **{name: name for name in SCORES}}
"""Name of each metric of a round of validation in tables."""
_SAME_DATA = {"validation_data": "Held-out losses", "score_data": "Metrics of previews"}
"""Hash of what was measured on, and what it was of."""
_NUMBERS = 40
_ANSWER_BYTES, _MOST_LETTERS = 1 << 14, 24


@dataclass(frozen=True, kw_only=True)
class Column:
    """One of the runs."""

    id: str
    name: str
    letter: str
    """`A` to `F`, by which notes and captions call it."""
    state: StateView
    compared: tuple[Compared, ...]
    """Predictions of its plan beside what was measured."""
    figures: Mapping[str, str]
    """Its row of `trainer runs list`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A name and the text of each run; empty where it has none."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GridRow:
    """A prompt and the preview of each run."""

    prompt: str
    cells: tuple[Sample | None, ...]
    answers: tuple[str, ...]
    """A language model's answers in place of pictures."""


@dataclass(frozen=True, kw_only=True)
class CompareView:
    """The page of two to six runs."""

    runs: tuple[Column, ...]
    over: str
    """One of OVER: what the curves are drawn over."""
    settings: tuple[Row, ...]
    """Keys of the configuration in which they differ."""
    decisions: tuple[Row, ...]
    """Decisions of the plans in which they differ."""
    figures: tuple[Row, ...]
    metrics: tuple[Row, ...]
    """Last value of each metric, with its step."""
    metric_notes: tuple[str, ...]
    curves: tuple[Curve, ...]
    drawing: Drawing | None
    numbers: tuple[tuple[int, tuple[str, ...]], ...]
    """Steps with the loss of each run, at most 40, evenly chosen; the CSV has all."""
    held_out: tuple[tuple[int, tuple[str, ...]], ...]
    steps: tuple[int, ...]
    """Steps with previews of any run."""
    step: int | None
    """The step whose previews are shown; None for the last ones of each run, and where there are none."""
    grid: tuple[GridRow, ...]
    """Previews at `step`, or each run's last."""
    grid_notes: tuple[str, ...]
    """Reasons why pictures beside each other are not of the same prompt, seed or settings."""

    @property
    def query(self) -> str:
        """The runs as a query of an address."""
        return "&".join(f"run={one.id}" for one in self.runs)

    @property
    def neighbours(self) -> tuple[int | None, int | None]:
        """The steps with previews before and after `step`; none where that is None."""
        if self.step is None:
            return None, None
        place = self.steps.index(self.step)
        before = self.steps[place - 1] if place > 0 else None
        return before, self.steps[place + 1] if place + 1 < len(self.steps) else None


def read_runs(studio: Studio, ids: Sequence[str]) -> list[Run]:
    """The runs of these ids. Raises UnknownIdError, and as `read_run`."""
    folders = run_folders(studio)
    return [read_run(found_by_id(studio.runs, one, folders)) for one in ids]


def compare_view(
    studio: Studio, ids: Sequence[str], *, step: int | None = None, over: str = OVER[0]
) -> CompareView:
    """The page of the runs with these ids, with previews at `step`.

    If it is not given, they are of the last step that all have; of each run's last where none is shared but
    the one before training.

    Raises UnknownIdError, DataError where a run's settings are damaged, StorageError.
    """
    runs = read_runs(studio, ids)
    steps, shown = _steps(runs, step)
    found = tuple(curve(run, over) for run in runs)
    samples = [
        [one for one in run.samples if one.step == (run.samples[-1].step if shown is None else shown)]
        for run in runs
    ]
    grid = tuple(_grid(studio, samples))
    figures = {name: tuple(run.figures[name] for run in runs) for name in runs[0].figures}
    return CompareView(
        runs=tuple(_column(studio, run, place) for place, run in enumerate(runs)),
        over=over,
        settings=tuple(
            Row(name=key, cells=tuple(values))
            for key, values in differing_settings(runs).items()
            if key != "output_dir"
        ),
        decisions=tuple(_decisions(runs)),
        figures=tuple(Row(name=name, cells=cells) for name, cells in figures.items() if any(cells)),
        metrics=tuple(_metrics(runs)),
        metric_notes=tuple(_metric_notes(runs)),
        curves=found,
        drawing=drawing(found),
        numbers=_numbers([run.losses for run in runs]),
        held_out=_numbers([run.held_out for run in runs]),
        steps=steps,
        step=shown,
        grid=grid,
        grid_notes=tuple(_grid_notes(grid, samples, shown)),
    )


def letter(place: int) -> str:
    """The letter by which the run at a place is called."""
    return "ABCDEF"[place]


def _column(studio: Studio, run: Run, place: int) -> Column:
    return Column(
        id=identifier(studio.runs, run.folder),
        name=name_of(studio.runs, run.folder),
        letter=letter(place),
        state=state_view(run),
        compared=compared(run),
        figures=run.figures,
    )


def _decisions(runs: Sequence[Run]) -> Iterator[Row]:
    plans = [{row.feature: row.value for row in run.plan.decisions} if run.plan else {} for run in runs]
    for feature in dict.fromkeys(name for plan in plans for name in plan):
        values = tuple(plan.get(feature, "") for plan in plans)
        if len(set(values)) > 1:
            yield Row(name=feature, cells=values)


def _metrics(runs: Sequence[Run]) -> Iterator[Row]:
    for name, title in METRICS.items():
        found = [
            [(step, values[name]) for step, values in run.rounds.items() if name in values] for run in runs
        ]
        if any(found):
            cells = tuple(f"{one[-1][1]:.4g} at step {one[-1][0]}" if one else "" for one in found)
            yield Row(name=title, cells=cells)


def _metric_notes(runs: Sequence[Run]) -> Iterator[str]:
    """A sentence for each kind of value that was not measured on the same in all runs."""
    for key, what in _SAME_DATA.items():
        hashes = [{str(row[key]) for row in run.rows if row.get(key) is not None} for run in runs]
        if len(set[str]().union(*hashes)) > 1:
            yield f"{what} were measured on other samples or with other settings: they do not compare."


def _numbers(series: Sequence[Sequence[tuple[int, float]]]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    values = [dict(one) for one in series]
    steps = sorted({step for one in values for step in one})
    if len(steps) > _NUMBERS:
        last = len(steps) - 1
        steps = [steps[round(place * last / (_NUMBERS - 1))] for place in range(_NUMBERS)]
    return tuple((step, tuple(f"{one[step]:.4g}" if step in one else "" for one in values)) for step in steps)


def _steps(runs: Sequence[Run], asked: int | None) -> tuple[tuple[int, ...], int | None]:
    """All steps with previews, and the one that is shown: None for each run's last."""
    each = [{one.step for one in run.samples} for run in runs]
    steps = tuple(sorted(set[int]().union(*each)))
    if asked in steps:
        return steps, asked
    drawing_runs = [one for one in each if one]
    shared = set[int].intersection(*drawing_runs) if drawing_runs else set[int]()
    # before the first step all are the base's: they tell nothing of the runs
    return steps, max(steps if steps == (0,) else shared - {0}, default=None)


def _by_prompt(samples: Sequence[Sample]) -> dict[tuple[str, int], Sample]:
    """Samples by their prompt, and its count where one is drawn several times."""
    found: dict[tuple[str, int], Sample] = {}
    for one in samples:
        prompt, count = one.prompt or f"prompt {one.number}", 0
        while (prompt, count) in found:
            count += 1
        found[prompt, count] = one
    return found


def _grid(studio: Studio, samples: Sequence[Sequence[Sample]]) -> Iterator[GridRow]:
    rows = [_by_prompt(one) for one in samples]
    for key in dict.fromkeys(key for row in rows for key in row):
        cells = tuple(row.get(key) for row in rows)
        yield GridRow(prompt=key[0], cells=cells, answers=tuple(_answer(studio, one) for one in cells))


def _answer(studio: Studio, sample: Sample | None) -> str:
    if sample is None or sample.answer is None:
        return ""
    with open_below(studio.runs, sample.answer) as file:
        return file.read(_ANSWER_BYTES).decode(errors="replace")


def _grid_notes(
    grid: Sequence[GridRow], samples: Sequence[Sequence[Sample]], step: int | None
) -> Iterator[str]:
    """A sentence for each way in which the previews beside each other are not of the same."""
    without = [letter(place) for place, one in enumerate(samples) if not one]
    if step is None:
        last = [f"{letter(place)} at step {one[0].step}" for place, one in enumerate(samples) if one]
        if last:
            yield f"No step of training with previews of all: each run's last, {', '.join(last)}."
    elif without:
        yield f"No previews at step {step}: {', '.join(without)}."
    told = set[str]()
    for row in grid:
        lacking = [letter(n) for n, one in enumerate(row.cells) if one is None and samples[n]]
        if lacking:
            yield f"Another prompt: {', '.join(lacking)} did not draw “{row.prompt}”."
        drawn = {letter(n): one.drawn_as for n, one in enumerate(row.cells) if one is not None}
        for key in sorted({key for texts in drawn.values() for key in texts} - {"prompt"}):
            values = {name: texts.get(key, "not recorded") for name, texts in drawn.items()}
            if len(set(values.values())) > 1:
                words = (f"{name} {value[:_MOST_LETTERS]}" for name, value in values.items())
                told.add(f"Another {key}: {', '.join(words)}.")
    yield from sorted(told)
