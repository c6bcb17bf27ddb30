"""Figures and verdicts of a comparison's variants, from the runs that were made."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.engine.comparing.rounds import Outcome, Run
from trainer.engine.comparing.variants import Variant
from trainer.errors import ExitCode
from trainer.machine import clocks
from trainer.telemetry import figures, losses
from trainer.telemetry.figures import Ratio, Times
from trainer.words.plurals import numbered
from trainer.words.sizes import GIB

LEAST_APART = 0.01
"""Share by which the mean loss of the last steps may differ however small the seed's band is."""
_EQUAL_WORK = 1e-3


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The step of a variant, over the timed steps of all rounds. None: not known here."""

    times: Times
    samples_per_second: float
    tokens_per_second: float | None
    tflops: float | None
    mfu: float | None
    allocated_gib: float | None
    driver_gib: float | None
    """Most memory in use on one GPU, as the driver showed it every two seconds."""
    first_step_seconds: tuple[float, ...]
    """From the start of the command to the first step's line, round by round."""
    faster: Ratio | None
    """How many times as fast as the first variant it does the same samples or tokens; None of the first."""
    more_work: float
    """Samples or tokens of its step over those of the first one's."""
    throttled: tuple[str, ...]
    """A text for each round in which the driver held the clocks back, but for the power cap."""
    power_capped: float | None
    """Share of looks at which the GPU was at its power cap; None where nobody looked."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Losses of a variant beside those of the first one, paired by step, and the verdict on them."""

    steps: int
    mean_apart: float
    """Mean |difference| of single losses, as a share of the first one's."""
    last_ratio: float
    """Mean loss of the last 50 steps, or of all where there are fewer, over the first one's."""
    band: float | None
    """How far another seed of the first is from it by the same measure; None without that run."""
    diverged_after: int | None = None
    """Steps with a finite loss, where it diverged."""

    @property
    def last_steps(self) -> int:
        """Steps of the means that are compared."""
        return min(losses.LAST, self.steps)

    @property
    def tolerance(self) -> float:
        """The share by which the last losses may differ: 1 %, or half the seed's band if that is more."""
        return max(LEAST_APART, (self.band or 0.0) / 2)

    @property
    def verdict(self) -> str:
        """The verdict with its figure."""
        if self.diverged_after is not None:
            return f"diverged after {numbered(self.diverged_after, 'step')}"
        apart, within = self.last_ratio - 1, f"within {self.tolerance:.1%}"
        last = f"last {numbered(self.last_steps, 'loss', 'losses')}"
        if abs(apart) <= self.tolerance:
            return f"learns the same: {last} {apart:+.2%}, {within}"
        kind = "worse" if apart > 0 else "more"
        return f"learns {kind}: {last} {apart:+.2%}, not {within}"


def speeds(variants: Sequence[Variant], outcome: Outcome, warmup: int) -> dict[str, Speed]:
    """The speed of each variant by its letter; those that no timed step is known of are left out."""
    found: dict[str, Speed] = {}
    base: tuple[list[list[float]], float] | None = None
    for variant in variants:
        runs = [run for run in outcome.timed(variant) if len(run.rows) > warmup]
        if not runs:
            continue
        # not of_steps: a step that overflowed fp16 has no loss
        rounds = [[1e3 * row["seconds_per_step"] for row in run.rows[warmup:]] for run in runs]
        timed = [row for run in runs for row in run.rows[warmup:]]
        work, faster, more = _work(timed), None, 1.0
        if variant is variants[0]:
            base = rounds, work
        elif base is not None:
            more = work / base[1]
            scale = more if abs(more - 1) > _EQUAL_WORK else 1.0
            if variant.config.family == variants[0].config.family:
                faster = figures.ratio_of_medians(base[0], rounds, scale=scale)
        found[variant.letter] = _speed(runs, timed, rounds, faster, more)
    return found


def _speed(
    runs: Sequence[Run],
    timed: Sequence[Mapping[str, Any]],
    rounds: Sequence[Sequence[float]],
    faster: Ratio | None,
    more: float,
) -> Speed:
    allocated = max(row.get("device_memory_peak_bytes", 0) for run in runs for row in run.rows)
    used = [look.used_mib for run in runs for look in run.looks if look.used_mib is not None]
    rate = _median(timed, "samples_per_second")
    assert rate is not None, "every log step has it"
    return Speed(
        times=figures.summed_up(rounds),
        samples_per_second=rate,
        tokens_per_second=_median(timed, "tokens_per_second"),
        tflops=_median(timed, "model_tflops"),
        mfu=_median(timed, "mfu"),
        allocated_gib=allocated / GIB if allocated else None,
        driver_gib=max(used) / 1024 if used else None,
        first_step_seconds=tuple(
            run.first_step_seconds for run in runs if run.first_step_seconds is not None
        ),
        faster=faster,
        more_work=more,
        throttled=tuple(f"{run.label}: {text}" for run in runs if (text := throttled(run))),
        power_capped=_power_capped(runs),
    )


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def _work(rows: Sequence[Mapping[str, Any]]) -> float:
    """Tokens of a step in the mean, or samples where no tokens are counted."""
    counted = all(row.get("tokens_per_second") is not None for row in rows)
    rate = "tokens_per_second" if counted else "samples_per_second"
    return statistics.fmean(row[rate] * row["seconds_per_step"] for row in rows)


def throttled(run: Run) -> str:
    """Why the driver held a run's clocks back, in how many looks, and the clocks; empty where it did not,
    or for the power cap alone.
    """
    counts = collections.Counter(
        reason for look in run.looks for reason in look.reasons if reason != clocks.POWER_CAP
    )
    if not counts:
        return ""
    reasons = ", ".join(f"{reason} in {count} of {len(run.looks)} looks" for reason, count in counts.items())
    seen = [look.mhz for look in run.looks if look.mhz is not None]
    most = max((look.most_mhz for look in run.looks if look.most_mhz is not None), default=None)
    if not seen:
        return reasons
    return f"{reasons}; {min(seen)} to {max(seen)} MHz" + (f" of {most}" if most else "")


def _power_capped(runs: Sequence[Run]) -> float | None:
    looks = [look for run in runs for look in run.looks]
    return sum(clocks.POWER_CAP in look.reasons for look in looks) / len(looks) if looks else None


def learned(outcome: Outcome) -> dict[str, Learned]:
    """The losses of each variant but the first, by its letter; those whose run is missing are left out."""
    if not outcome.learned or outcome.learned[0].code != ExitCode.OK:
        return {}
    first, *others = outcome.learned
    again = [] if outcome.again is None else _paired(outcome.again, first)
    band = abs(_compared(again)["last_loss_ratio"] - 1) if again else None
    found: dict[str, Learned] = {}
    for run in others:
        common = _paired(run, first)
        if run.code not in (ExitCode.OK, ExitCode.DIVERGED) or not common:
            continue
        # code 70 with all its losses: what the run made changes nothing, as it said itself
        diverged = run.code == ExitCode.DIVERGED and len(run.losses) < len(first.losses)
        compared = {} if diverged else _compared(common)
        found[run.variant.letter] = Learned(
            steps=len(common),
            mean_apart=compared.get("mean_apart", math.nan),
            last_ratio=compared.get("last_loss_ratio", math.nan),
            band=band,
            diverged_after=len(run.losses) if diverged else None,
        )
    return found


def _paired(run: Run, first: Run) -> list[tuple[float, float]]:
    """The losses of two runs at the steps at which both have one."""
    pairs = zip(run.losses, first.losses, strict=False)
    return [pair for pair in pairs if all(map(math.isfinite, pair))]


def _compared(pairs: Sequence[tuple[float, float]]) -> Mapping[str, float]:
    return losses.compare([one for one, _ in pairs], [other for _, other in pairs])
