"""A plan, or the reason why there is none, as a page shows it: bars, times, decisions, ways out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from trainer.config.reading.load import Loaded
from trainer.config.schema import RunConfig
from trainer.errors import MEANING, ExitCode, Problem, TrainerError
from trainer.files.component_shapes import stamp_of
from trainer.machine.facts import Facts
from trainer.machine.reading import recorded
from trainer.modeling.base.base import is_repository, local_folder
from trainer.planning.choose.fastest_fit import DoesNotFitError
from trainer.planning.choose.suggestions import changes_text
from trainer.planning.data_rows import whole_plan
from trainer.planning.plan import Decision, MemoryRow, Plan
from trainer.planning.planning import machine_facts, requested_profile
from trainer.planning.shapes.set_look import stamp
from trainer.ui.forms import SOURCE, value_text
from trainer.words.sizes import gib

_FACTS_SECONDS = 10
"""Age at which this machine is looked at again: free memory changes."""
_KEPT_PLANS = 256
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
    download: str = ""
    """Size of the base model's files that are not here yet, in words; empty where all are."""
    download_page: str = ""
    """Address of its page on the hub."""
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
            replace(one, remedy="") if self.ways_out else one for one in map(with_one_key, self.problems)
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


def with_one_key(problem: Problem) -> Problem:
    """A problem whose place is the key of what was typed; nowhere, where its text begins with that key."""
    where = problem.where.removeprefix(SOURCE)
    return replace(problem, where="" if problem.what.startswith(f"`{where}`") else where)


def source_word(source: str) -> str:
    """The source of a decision: `you` for a field, a file without its folders, others as they are."""
    return "you" if source.startswith(SOURCE) else source.rpartition("/")[2]


def of_plan(plan: Plan, config: RunConfig, facts: Facts) -> Planned:
    """The plan of a configuration on a machine, as it is shown."""
    steps = config.train.max_train_steps
    seconds = plan.step_seconds or 0.0
    missing = next((row for row in plan.decisions if row.feature == "download"), None)
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
        download="" if missing is None else f"{missing.value} to download, {missing.reason}",
        download_page=_model_page(config),
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


_PLANS = dict[object, tuple[Loaded, "Planned"]]()
"""The latest plans: a value that is taken back is not planned again."""


def plan_on(loaded: Loaded, machine: str) -> tuple[Loaded, Planned]:
    """The configuration as it is planned, and its plan on this machine, or on one that was recorded as the
    JSON `machine`.
    """
    try:
        tick, profile = _tick(), requested_profile()
        facts = _recorded(machine) if machine.strip() else _machine_at(tick)
        written = loaded.config.model_dump_json(), tuple(sorted(loaded.sources.items()))
        key = (*written, machine.strip() or tick, profile, _stamps(loaded.config))
        found = _PLANS.get(key)
        if found is None:
            final, plan = whole_plan(loaded, facts, profile)
            if len(_PLANS) >= _KEPT_PLANS:
                _PLANS.clear()
            found = _PLANS[key] = final, of_plan(plan, final.config, facts)
        return found
    except TrainerError as error:
        return loaded, of_error(error, model=_model_page(loaded.config))


def _stamps(config: RunConfig) -> tuple[object, ...]:
    """Everything on the disk that a plan is made from, as it is now."""
    folder, checkpoints = local_folder(config), config.output_dir / "checkpoints"
    here = [path for path in (folder, checkpoints) if path is not None and path.exists()]
    return stamp_of(here), stamp(config.data.sets)


def this_machine() -> Facts:
    """Facts of this machine, at most _FACTS_SECONDS old."""
    return _machine_at(_tick())


def _tick() -> int:
    return int(time.monotonic() / _FACTS_SECONDS)


@lru_cache(maxsize=1)
def _machine_at(tick: int) -> Facts:
    return machine_facts()


@lru_cache(maxsize=8)
def _recorded(text: str) -> Facts:
    remedy = "paste what `trainer probe --json` wrote there, or nothing for this machine"
    return recorded(text, "another machine", remedy)


def _model_page(config: RunConfig) -> str:
    """Address of the base model's page on the hub; empty for a folder."""
    name = config.model.pretrained_model_name_or_path
    return f"https://huggingface.co/{name}" if is_repository(config) else ""
