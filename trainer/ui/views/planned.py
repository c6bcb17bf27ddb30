"""A plan, or the reason why there is none, as a page shows it: bars, times, decisions, ways out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.config.schema import RunConfig
from trainer.errors import MEANING, ExitCode, Problem, TrainerError
from trainer.machine.facts import Facts
from trainer.planning.choose.fit import DoesNotFitError
from trainer.planning.choose.suggestions import changes_text
from trainer.planning.plan import Decision, MemoryRow, Plan
from trainer.ui.forms import SOURCE, value_text
from trainer.words.sizes import gib

FITS, TIGHT = 0.85, 0.97
"""Shares of a budget up to which a bar is green, and amber."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One component of a bar; `start` and `width` are per cent of the bar's length."""

    name: str
    bytes: int
    detail: str
    start: float
    width: float


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Memory by component against its limit."""

    title: str
    segments: tuple[Segment, ...]
    bytes: int
    limit_bytes: int
    limit: float
    """Place of the limit, in per cent of the bar's length."""
    planned: bool
    """Whether a plan was made within the limit: then it fits, though tightly."""

    @property
    def share(self) -> float:
        """Share of the limit that is taken; above 1 where it does not suffice, or is 0."""
        return self.bytes / self.limit_bytes if self.limit_bytes else 2.0

    @property
    def state(self) -> str:
        """`fits`, `tight` or `full`: green, amber or red."""
        if self.share <= FITS:
            return "fits"
        return "tight" if self.share <= TIGHT or self.planned else "full"


@dataclass(frozen=True, kw_only=True)
class WayOut:
    """Changes with which the run fits."""

    text: str
    peak: str
    values: tuple[tuple[str, str], ...]
    """Keys of fields, and what to type in them."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, or with `code` the exit code that a start would end with, and its problems."""

    plan: Plan | None = None
    bars: tuple[Bar, ...] = ()
    step_seconds: float = 0.0
    """Predicted for an optimizer step; 0 where the machine's rates are not known."""
    total_seconds: float = 0.0
    """Predicted for all steps, without encoding, previews and saving."""
    disk_bytes: int = 0
    steps: int = 0
    code: ExitCode = ExitCode.OK
    problems: tuple[Problem, ...] = ()
    ways_out: tuple[WayOut, ...] = ()
    model_page: str = ""
    """Address of the base model's page, where there is no access to it."""

    @property
    def meaning(self) -> str:
        """The exit code in words."""
        return MEANING[self.code]

    @property
    def state(self) -> str:
        """The worst of its bars' states."""
        return max((one.state for one in self.bars), key=("fits", "tight", "full").index, default="full")

    @property
    def summary(self) -> str:
        """The plan in one sentence, also for screen readers."""
        if self.plan is None:
            return f"{self.meaning[:1].upper()}{self.meaning[1:]} (exit code {self.code.value})"
        most = max(self.bars[:2], key=lambda one: one.share)
        return f"{gib(most.bytes)} of {gib(most.limit_bytes)} for {most.title}"

    @property
    def told(self) -> tuple[Problem, ...]:
        """The problems, with keys in place of what was typed; ways out are told apart."""
        return tuple(
            replace(one, where=one.where.removeprefix(SOURCE), remedy="" if self.ways_out else one.remedy)
            for one in self.problems
        )

    @property
    def rows(self) -> tuple[Decision, ...]:
        """The decisions, with sources as a page says them."""
        rows = () if self.plan is None else self.plan.decisions
        return tuple(replace(row, source=source_word(row.source)) for row in rows)

    @property
    def is_of_fields(self) -> bool:
        """True where the problems are about values that can be corrected in the form."""
        return self.code in (ExitCode.BAD_CONFIG, ExitCode.HARDWARE)

    def decision(self, feature: str) -> Decision | None:
        """The row of the plan on a feature; None where it has none."""
        rows = () if self.plan is None else self.plan.decisions
        return next((row for row in rows if row.feature == feature), None)


def source_word(source: str) -> str:
    """The source of a decision: `you` for a field, a file without its folders, others as they are."""
    return "you" if source.startswith(SOURCE) else source.rpartition("/")[2]


def of_plan(plan: Plan, config: RunConfig, facts: Facts) -> Planned:
    """The plan of a configuration on a machine, as it is shown."""
    steps = config.train.max_train_steps
    seconds = plan.step_milliseconds * plan.accumulation_steps / plan.ranks / 1e3
    bars = [
        bar("training", plan.train_memory, plan.budget_bytes, planned=True),
        bar("encoding captions and images", plan.cache_memory, plan.budget_bytes, planned=True),
    ]
    if plan.host_memory:
        bars.append(bar("host memory", plan.host_memory, facts.memory.available_bytes))
    return Planned(
        plan=plan,
        bars=tuple(bars),
        step_seconds=seconds,
        total_seconds=seconds * steps,
        disk_bytes=plan.disk_bytes,
        steps=steps,
    )


def of_error(error: TrainerError, model: str = "") -> Planned:
    """The refusal of a run; `model` is the address of its base model's page."""
    bars, ways = tuple[Bar, ...](), tuple[WayOut, ...]()
    if isinstance(error, DoesNotFitError):
        least = MemoryRow("at least", error.least_bytes, "the smallest setting that was left open")
        bars = (bar("memory", (least,), error.budget_bytes),)
        ways = tuple(
            WayOut(
                text=changes_text(one.changes),
                peak=one.peak,
                values=tuple((key, value_text(value)) for key, value in one.changes),
            )
            for one in error.nearest
        )
    return Planned(
        bars=bars,
        code=error.exit_code,
        problems=error.problems,
        ways_out=ways,
        model_page=model if error.exit_code is ExitCode.NO_ACCESS else "",
    )


def bar(title: str, rows: Sequence[MemoryRow], limit_bytes: int, *, planned: bool = False) -> Bar:
    """Rows side by side, on a length that shows the sum and its limit whole; see `Bar.planned`."""
    total = sum(row.bytes for row in rows)
    length, start, segments = max(total, limit_bytes, 1), 0.0, list[Segment]()
    for row in rows:
        width = 100 * row.bytes / length
        segments.append(Segment(name=row.name, bytes=row.bytes, detail=row.detail, start=start, width=width))
        start += width
    return Bar(
        title=title,
        segments=tuple(segments),
        bytes=total,
        limit_bytes=limit_bytes,
        limit=100 * limit_bytes / length,
        planned=planned,
    )
