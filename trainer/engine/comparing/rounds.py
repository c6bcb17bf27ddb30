"""The runs of a comparison: rounds in the order A B B A, then those that are to show what is learned."""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import environment
from trainer.config.writing.dump import dump
from trainer.engine.comparing import child
from trainer.engine.comparing.differences import planned_otherwise
from trainer.engine.comparing.variants import SEEDS, Variant, measured_config
from trainer.errors import ConfigError, ExitCode, HardwareError, TrainerError
from trainer.files import codec
from trainer.machine import idle
from trainer.machine.clocks import Look
from trainer.planning.plan import Plan
from trainer.telemetry.run_folder.plan import PLAN_FILE
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics
from trainer.telemetry.supervising.signals import collected
from trainer.words.plurals import numbered

_WEIGHTS = ("model", "checkpoints")
"""Folders of a run that hold whole models."""
_LAST_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The lengths of a comparison's runs, in optimizer steps."""

    steps: int
    """Steps of a round that are timed."""
    warmup: int
    """Steps before them."""
    rounds: int
    learn: int
    """Steps of the runs that show what is learned; 0 without them."""

    def require_timed_steps(self) -> None:
        """Raise ConfigError where no run would have a timed step."""
        if not self.rounds and self.learn <= self.warmup:
            remedy = "write --learn N with more steps than --warmup, or --rounds 1 or more"
            raise ConfigError("no step would be timed", where="--rounds 0", remedy=remedy)

    @property
    def timed_steps(self) -> int:
        """Steps of a run that step times are taken from."""
        return self.steps if self.rounds else self.learn - self.warmup


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run that ended, however it did."""

    variant: Variant
    label: str
    """Its place, for people: `round 1, A`."""
    rows: Sequence[Mapping[str, Any]]
    """Its metrics, one row a step."""
    code: int
    first_step_seconds: float | None = None
    looks: Sequence[Look] = ()
    notes: tuple[str, ...] = ()
    said: str = ""
    """The last lines that it printed."""

    @property
    def losses(self) -> list[float]:
        """Losses by step, of a run that diverged without the last ones that are not finite; NaN of a step
        that overflowed fp16 and was skipped.
        """
        found = [row["loss"] for row in self.rows if "loss" in row]
        while self.code == ExitCode.DIVERGED and found and found[-1] is None:
            found.pop()
        return [math.nan if loss is None else loss for loss in found]


@dataclass(eq=False, kw_only=True)
class Outcome:
    """All runs of a comparison, and how it ended."""

    rounds: list[list[Run]] = field(default_factory=list)
    learned: list[Run] = field(default_factory=list)
    again: Run | None = None
    """The first variant with another seed."""
    code: int = ExitCode.OK
    why: str = ""
    """Why there are no more runs; empty where all were made."""
    error: TrainerError | None = None

    @property
    def has_steps(self) -> bool:
        """True if a run of it trained a step."""
        return any(run.rows for one in [*self.rounds, self.learned] for run in one)

    def timed(self, variant: Variant) -> list[Run]:
        """The runs of a variant that step times are taken from, one a round: also one that was stopped."""
        every = [run for one in self.rounds for run in one] or self.learned
        return [
            run for run in every if run.variant is variant and run.code in (ExitCode.OK, ExitCode.STOPPED)
        ]


def in_order(variants: Sequence[Variant], rounds: int) -> Iterator[list[Variant]]:
    """The variants of each round: A B, B A, A B: what drifts with time falls on all alike."""
    for number in range(rounds):
        yield list(variants if number % 2 == 0 else reversed(variants))


@dataclass(eq=False, kw_only=True)
class _Comparison:
    """A comparison under way."""

    variants: Sequence[Variant]
    extent: Extent
    root: Path
    environ: Mapping[str, str]
    tell: Callable[[str], None]
    received: list[tuple[float, int]]
    outcome: Outcome = field(default_factory=Outcome)

    def write_config(self, variant: Variant, steps: int, path: Path, *, other_seed: bool) -> None:
        """Write the configuration of a run, with every value, as its file."""
        first = self.variants[0]
        seed = (variant if variant.own_seed else first).config.train.seed
        if other_seed:
            seed = seed_of_none(self.variants)
        cache = environment.cache_dir(first.config, self.environ).absolute()
        path.write_text(dump(measured_config(variant, steps, seed=seed, cache=cache)))

    def start(
        self, variant: Variant, label: str, steps: int, *, command: str = "train", other_seed: bool = False
    ) -> Run:
        """One run from start to end. Raises HardwareError where a GPU of it is busy."""
        gpus = child.gpus_of(variant.plan)
        child.require_idle(gpus, patience=idle.PATIENCE_SECONDS)
        folder = self.root / label.replace(",", "").replace(" ", "-")
        config, log, runtime = (folder.with_suffix(one) for one in (".yaml", ".txt", ".runtime"))
        self.write_config(variant, steps, config, other_seed=other_seed)
        watch = child.Watch(log=folder / METRICS_LOG, steps=steps, gpus=gpus)
        words = [command, str(config), "--output", str(folder)]
        code = child.run(words, self.environ, log, runtime, received=self.received, look=watch.look)
        shutil.rmtree(runtime, ignore_errors=True)
        for large in _WEIGHTS:  # of a whole model 16 GiB and more, and nobody looks at them
            shutil.rmtree(folder / large, ignore_errors=True)
        notes = [f"GPU not watched: {watch.problem}"] if watch.problem else []
        if command == "train" and (folder / PLAN_FILE).is_file():
            ran = codec.from_json(Plan, (folder / PLAN_FILE).read_text(), PLAN_FILE)
            notes += [text] if (text := planned_otherwise(variant, ran)) else []
        return Run(
            variant=variant,
            label=label,
            rows=[row for row in read_metrics(folder / METRICS_LOG) if "seconds_per_step" in row],
            code=code,
            first_step_seconds=watch.first_step_seconds,
            looks=tuple(watch.looks),
            notes=tuple(notes),
            said="\n".join(log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]),
        )

    def ended_well(self, run: Run) -> bool:
        """Whether this run ended well; how else it ended, and what was noticed, is told."""
        for note in run.notes:
            self.tell(f"{run.label}: {note}")
        if self.received:
            self.outcome.code, self.outcome.why = ExitCode.STOPPED, f"stopped in {run.label}"
            return False
        if run.code == ExitCode.OK:
            return True
        self.outcome.code, self.outcome.why = run.code, f"{run.label} ended with exit code {run.code}"
        self.tell(f"{run.said}\n{self.outcome.why}")
        return False

    def all_runs(self) -> None:
        """Encode, then the rounds, then the runs of `learn`; ends early where one did not end well."""
        for variant in self.variants:
            self.tell(f"cache {variant.letter}: samples that are not there yet are encoded")
            if not self.ended_well(self.start(variant, f"cache {variant.letter}", 1, command="cache")):
                return
        steps = self.extent.warmup + self.extent.steps
        for number, order in enumerate(in_order(self.variants, self.extent.rounds), 1):
            self.outcome.rounds.append([])
            for variant in order:
                run = self.start(variant, f"round {number}, {variant.letter}", steps)
                self.outcome.rounds[-1].append(run)
                self.tell(f"{run.label}: {short(run, self.extent.warmup)}")
                if not self.ended_well(run):
                    return
        if self.extent.learn:
            self.learning_runs()

    def learning_runs(self) -> None:
        """One long run of each variant, then the first once more with another seed.

        One that diverges, but the first, says enough about itself: the others go on.
        """
        first, steps = self.variants[0], self.extent.learn
        for variant in self.variants:
            run = self.start(variant, f"learn, {variant.letter}", steps)
            self.outcome.learned.append(run)
            self.tell(f"{run.label}: {short(run, self.extent.warmup)}")
            ended = self.ended_well(run) or (run.code == ExitCode.DIVERGED and variant is not first)
            if not ended or self.received:
                return
        run = self.start(first, f"learn, {first.letter} with another seed", steps, other_seed=True)
        self.tell(f"{run.label}: {short(run, self.extent.warmup)}")
        if self.ended_well(run):
            self.outcome.again = run
            self.outcome.why = ""  # all were made: one that diverged has a row that says so


def seed_of_none(variants: Sequence[Variant]) -> int:
    """The seed behind the first variant's that no variant is run with."""
    first, *others = variants
    taken = {one.config.train.seed for one in others if one.own_seed}
    behind = (seed % SEEDS for seed in itertools.count(first.config.train.seed + 1))
    return next(seed for seed in behind if seed not in taken)


def short(run: Run, warmup: int) -> str:
    """One run in a line."""
    times = [1e3 * row["seconds_per_step"] for row in run.rows[warmup:]]
    if run.code != ExitCode.OK or not times:
        return f"exit code {run.code} after {numbered(len(run.rows), 'step')}"
    finite = [loss for loss in run.losses if math.isfinite(loss)]
    loss = f"loss {finite[-1]:.4g}" if finite else "no finite loss"
    return f"{statistics.median(times):,.1f} ms/step, {loss} after {numbered(len(run.rows), 'step')}"


def compare(
    variants: Sequence[Variant],
    extent: Extent,
    output: Path | None,
    environ: Mapping[str, str],
    tell: Callable[[str], None],
) -> Outcome:
    """Make all runs in folders below `output`, a temporary one if not given; call it on the main thread.

    SIGTERM and SIGINT end it early, and are ignored afterwards. A run that fails ends it with its exit code,
    a GPU that is busy with 69.
    """
    with collected() as received, contextlib.ExitStack() as opened:
        if output is None:
            root = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="trainer-compare-")))
        else:
            output.mkdir(parents=True, exist_ok=True)
            root = output.absolute()
        # what such variables say is in the files of the runs, over which they would lie again
        kept = environment.without_settings(environ)
        comparison = _Comparison(
            variants=variants, extent=extent, root=root, environ=kept, tell=tell, received=received
        )
        try:
            comparison.all_runs()
        except HardwareError as error:
            comparison.outcome.error, comparison.outcome.code = error, error.exit_code
            comparison.outcome.why = str(error)
    return comparison.outcome
