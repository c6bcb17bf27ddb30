"""The report of a comparison: a table for the terminal, and one of the shape of docs/benchmarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.engine.comparing import child, verdicts
from trainer.engine.comparing.differences import sentences
from trainer.engine.comparing.plot import write_plot
from trainer.engine.comparing.rounds import Extent, Outcome
from trainer.engine.comparing.variants import Variant
from trainer.engine.comparing.verdicts import Learned, Speed
from trainer.errors import ExitCode
from trainer.files import atomic
from trainer.machine.description import Machine, describe
from trainer.telemetry import losses, measurement
from trainer.telemetry.figures import Ratio
from trainer.telemetry.measurement import Curves, Table
from trainer.words.plurals import numbered
from trainer.words.tables import aligned

_FEW_ROUNDS = 4
"""Rounds from which on those of equal variants are mixed nearly always."""
_OTHER_SHARE = 0.2
"""Difference of shares of looks at the power cap of which is told."""


def compared(ratio: Ratio) -> str:
    """The ratio of two speeds with its interval; none where these do not tell them apart."""
    if not ratio.has_interval:
        return f"{ratio.value:.3f} times (no interval)"
    interval = f"95 %: {ratio.low:.3f} to {ratio.high:.3f}"
    return f"{ratio.value:.3f} times ({interval})" if ratio.tells_apart else f"no difference ({interval})"


def figures_by_name(variants: Sequence[Variant], outcome: Outcome, extent: Extent) -> dict[str, list[str]]:
    """The cells of each figure, a cell a variant; figures that no variant has are left out."""
    speeds = verdicts.speeds(variants, outcome, extent.warmup)
    learned = verdicts.learned(outcome)
    first, last = variants[0].letter, max((one.last_steps for one in learned.values()), default=0)
    rows: dict[str, list[str]] = {}
    for variant in variants:
        cells = {
            **_speed_cells(speeds.get(variant.letter), first),
            **_learned_cells(learned.get(variant.letter), first, last),
        }
        for name, cell in cells.items():
            rows.setdefault(name, []).append(cell)
    return {name: cells for name, cells in rows.items() if any(cells)}


def _speed_cells(speed: Speed | None, first: str) -> dict[str, str]:
    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:,.{digits}f}"

    names = (
        *("ms/step, median", "fastest to slowest", "medians of rounds", "tokens/s", "images/s"),
        *("model TFLOP/s", "MFU", "peak GiB allocated", "peak GiB by the driver", "first step, s"),
        *(f"as fast as {first}", "looks at the power cap", "throttled"),
    )
    if speed is None:
        return dict.fromkeys(names, "")
    times, of_samples = speed.times, speed.tokens_per_second is None
    cells = (
        number(times.median, 1),
        f"{times.fastest:,.1f} to {times.slowest:,.1f}",
        ", ".join(number(one, 1) for one in times.round_medians),
        number(speed.tokens_per_second, 0),
        number(speed.samples_per_second, 2) if of_samples else "",
        "" if speed.tflops is None else f"{speed.tflops:.3g}",
        "" if speed.mfu is None else f"{speed.mfu:.1%}",
        number(speed.allocated_gib, 1),
        number(speed.driver_gib, 1),
        ", ".join(number(one, 0) for one in speed.first_step_seconds),
        "" if speed.faster is None else compared(speed.faster),
        f"{speed.power_capped:.0%}" if speed.power_capped else "",
        "; ".join(speed.throttled),
    )
    return dict(zip(names, cells, strict=True))


def _learned_cells(learned: Learned | None, first: str, last: int) -> dict[str, str]:
    names = ("single losses apart, mean", f"last {numbered(last, 'loss', 'losses')}, of {first}'s", "learned")
    if learned is None:
        return dict.fromkeys(names, "")
    if learned.diverged_after is not None:
        return dict(zip(names, ("", "", learned.verdict), strict=True))
    return dict(
        zip(names, (f"{learned.mean_apart:.2%}", f"{learned.last_ratio:.4f}", learned.verdict), strict=True)
    )


def notes(variants: Sequence[Variant], outcome: Outcome, extent: Extent) -> list[str]:
    """Sentences below the table: what was run, what the figures mean, and why they may not be trusted."""
    speeds = verdicts.speeds(variants, outcome, extent.warmup)
    found = _notes_on_times(variants, outcome, extent, speeds)
    longest = max(one.config.train.lr_warmup_steps for one in variants)
    if extent.learn and longest >= extent.learn:
        found.append(
            f"the learning rate rises through all of --learn's {extent.learn} steps: train.lr_warmup_steps is"
            f" {longest}"
        )
    capped = [one.power_capped for one in speeds.values() if one.power_capped is not None]
    if capped and max(capped) - min(capped) > _OTHER_SHARE:
        found.append("they are at the power cap for unequal shares: under another limit the ratio is another")
    if any(one.throttled for one in speeds.values()):
        found.append("the driver held clocks back in rounds that are marked: their times are of that")
    if outcome.again is not None:
        one = next((one for one in verdicts.learned(outcome).values() if one.band is not None), None)
        apart = (
            ""
            if one is None
            else f": its last {numbered(one.last_steps, 'loss is', 'losses are')} {one.band:.2%} apart"
        )
        found.append(f"another seed of {variants[0].letter} was run{apart}")
    return [*found, *([f"not all runs were made: {outcome.why}"] if outcome.why else [])]


def _notes_on_times(
    variants: Sequence[Variant], outcome: Outcome, extent: Extent, speeds: Mapping[str, Speed]
) -> list[str]:
    """Sentences on what was timed, and how far ratios of it may be trusted."""
    whole = [one for one in outcome.rounds if [run.code for run in one].count(ExitCode.OK) == len(variants)]
    timed = f"{numbered(extent.timed_steps, 'step')} each after {extent.warmup} that are not timed"
    found = []
    if outcome.rounds:
        found.append(f"{len(whole)} of {extent.rounds} rounds, {timed}")
    elif speeds:
        found.append(f"no rounds, times are of the runs that learn: {timed}")
    unequal = [letter for letter, one in speeds.items() if abs(one.more_work - 1) > 1e-3]
    found += [
        f"{letter}'s step has {speeds[letter].more_work:.3f} times the samples or tokens: speeds are of these"
        for letter in unequal
    ]
    if any(one.mfu is not None for one in speeds.values()):
        found.append("MFU is of the bf16 peak, whatever products are in: FP8 may be above 100 %")
    ratios = [one.faster for one in speeds.values() if one.faster is not None]
    runs = len(whole) if outcome.rounds else 1
    if ratios and runs < _FEW_ROUNDS:
        found.append(
            f"{numbered(runs, 'run')} of each: how far apart two of one variant are"
            f" is hardly known, {_FEW_ROUNDS} rounds tell"
        )
    if not all(one.has_interval for one in ratios):
        found.append("one step of each run: nothing is known of how steps vary, --steps 2 or more tell")
    return found


def nothing_trained(outcome: Outcome, files: Sequence[Path]) -> str:
    """The end of a comparison that trained no step, with the `files` that are not written for that."""
    left = "".join(f", and {file} is not written" for file in files)
    why = "" if outcome.error is not None or not outcome.why else f"{outcome.why}: "  # an error tells itself
    return f"{why}no step was trained, so there is nothing to compare{left}"


def lines(variants: Sequence[Variant], outcome: Outcome, extent: Extent) -> list[str]:
    """The table for a terminal: a figure a line, a column a variant, notes below."""
    rows = figures_by_name(variants, outcome, extent)
    # a mark is a line of its own: it would make its column as wide
    rows.pop("throttled", None)
    speeds = verdicts.speeds(variants, outcome, extent.warmup)
    marked = [f"throttled: {mark}" for one in speeds.values() for mark in one.throttled]
    head = [["", *(variant.letter for variant in variants)], ["", *(variant.title for variant in variants)]]
    table = aligned([*head, *([name, *cells] for name, cells in rows.items())]) if rows else []
    return [*table, "", *marked, *notes(variants, outcome, extent)]


def write_files(
    variants: Sequence[Variant],
    outcome: Outcome,
    extent: Extent,
    words: Sequence[str],
    *,
    record: Path | None,
    plot: Path | None,
) -> None:
    """Write the comparison as a record of this machine and as a picture, where they have a path.

    `words` are those of the command, without folders.
    """
    if record is not None:
        lengths = [f"--{name} {value}" for name, value in vars(extent).items() if value or name == "rounds"]
        command = " ".join(["trainer", "compare", *words, *lengths])
        machine = describe(gpus=child.gpus_of(variants[0].plan))
        table = table_of(variants, outcome, extent, machine=machine, command=command)
        record.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(record, measurement.to_json(table))
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        write_plot(variants, outcome, extent.warmup, plot)


def table_of(
    variants: Sequence[Variant], outcome: Outcome, extent: Extent, *, machine: Machine, command: str
) -> Table:
    """The comparison as a record: a row a variant, and the losses of the longest runs."""
    rows = figures_by_name(variants, outcome, extent)
    names = [variant.name for variant in variants]
    cells = [(name, *(row[number] for row in rows.values())) for number, name in enumerate(names)]
    said = [*map(str.strip, sentences(variants)), *notes(variants, outcome, extent)]
    return Table(
        title=f"{names[0]} beside {', '.join(names[1:])}",
        text=" ".join(f"{one[0].upper()}{one[1:]}." for one in said),
        machine=machine,
        command=command,
        columns=("variant", *rows),
        rows=tuple(cells),
        curves=_curves(outcome),
    )


def _curves(outcome: Outcome) -> Curves | None:
    """The losses of each variant, smoothed; None where there is no run that shows them."""
    runs = outcome.learned or [run for one in outcome.rounds[:1] for run in one]
    longest = max((len(run.losses) for run in runs), default=0)
    if not longest:
        return None
    every = losses.steps_per_point(longest)
    found: Mapping[str, tuple[float, ...]] = {
        run.variant.name: losses.curve(_without_gaps(run.losses), every) for run in runs
    }
    return Curves(steps=every, losses=found)


def _without_gaps(found: Sequence[float]) -> list[float]:
    """Losses of which a step without one has that of the step before it, or is left out where none is."""
    filled: list[float] = []
    for loss in found:
        filled += [loss] if math.isfinite(loss) else filled[-1:]
    return filled
