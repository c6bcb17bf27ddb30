"""One run: what it does, how it compares with its plan, its numbers, previews, log and files."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ExitCode, Problem
from trainer.telemetry import control
from trainer.telemetry.control import Request
from trainer.telemetry.run_folder.plan import PlannedDecision
from trainer.telemetry.run_folder.results import Sample, SavedFile
from trainer.telemetry.runs import Run, State, read_run
from trainer.telemetry.status import Phase
from trainer.telemetry.stop import ON_REQUEST
from trainer.ui.opened import tail
from trainer.ui.studio import Studio, identifier
from trainer.ui.views.kept import Kept, kept_settings
from trainer.ui.views.queueing.more import More, more_of
from trainer.ui.views.result import FileView, ResultView, result_view
from trainer.ui.views.runs import name_of, run_folder
from trainer.ui.views.state import LOG_FILE, StateView, remedy, state_view
from trainer.ui.views.trying.choice import lora_files
from trainer.words.sizes import gib

LEVELS = ("all", "warning", "error")
"""Filters of the log: all lines, or those of a level and above."""
_LOG_BYTES, _LOG_LINES, _LAST_LINES = 1 << 17, 200, 20
_MOST_NUMBERS = 100
_SEVERE = {"warning": 1, "error": 2, "critical": 2}
_BAR = (
    ((Phase.LOAD,), "Load"),
    ((Phase.CACHE,), "Encode"),
    ((Phase.FIRST_STEP,), "First step"),
    ((Phase.TRAIN, Phase.PREVIEW), "Train"),
    ((Phase.SAVE,), "Save"),
)
_RESERVED = "device_memory_reserved_bytes"
_NUMBERS = {
    "loss": "loss", "validation_loss": "held-out loss", "learning_rate": "learning rate",
    "grad_norm": "gradient norm", "seconds_per_step": "s/step", _RESERVED: "GPU memory",
}  # fmt: skip
"""Columns of the table of numbers, by their name in metrics.jsonl."""


@dataclass(frozen=True)
class PhaseView:
    """A part of the work in the bar: `done`, `now` or `next`."""

    word: str
    when: str


@dataclass(frozen=True)
class Compared:
    """A prediction of the plan beside what was measured; None where one is not known."""

    name: str
    predicted: float | None
    measured: float | None
    unit: str
    """`s` or `bytes`."""

    @property
    def ratio(self) -> float | None:
        """Measured through predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None


@dataclass(frozen=True)
class LogLine:
    """A line of the log."""

    time: str
    level: str
    text: str


@dataclass(frozen=True, kw_only=True)
class EndView:
    """How a run ended, where that was not well."""

    code: int | None
    meaning: str
    cause: str
    problems: tuple[Problem, ...]
    remedy: str
    lines: tuple[LogLine, ...]
    """The last lines of its log."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The page of a run."""

    id: str
    name: str
    folder: str
    family: str
    method: str
    state: StateView
    phases: tuple[PhaseView, ...]
    step: int
    steps: int | None
    seconds_left: float | None
    figures: Mapping[str, str]
    """The row of `trainer runs list`, without what the page shows otherwise, and without empty cells."""
    compared: tuple[Compared, ...]
    end: EndView | None
    warnings: tuple[str, ...]
    decisions: tuple[PlannedDecision, ...]
    previews: tuple[tuple[str, tuple[Sample, ...]], ...]
    """Samples by prompt, each by step."""
    preview_steps: tuple[int, ...]
    log: tuple[LogLine, ...]
    level: str
    columns: Mapping[str, str]
    """Titles of the table of numbers, by their name in metrics.jsonl; a CPU's run has no GPU memory."""
    numbers: tuple[tuple[int, tuple[str, ...]], ...]
    """Last log steps, newest first: step and the values of these columns as text."""
    result: ResultView | None
    """Its LoRA; None while it runs, and without one."""
    shown: FileView | None
    """The picture with prompts without and with the result; None where there is none."""
    checkpoints: tuple[tuple[int, int], ...]
    """Step and bytes."""
    files: tuple[FileView, ...]
    settings: Kept | None
    """Settings that a new run can begin with; None where nobody kept any."""
    damaged_lines: int
    requests: tuple[Request, ...]
    """Orders that it was given while it runs, oldest first."""
    obstacle: Problem | None
    """The reason why it cannot be asked for anything though it runs; None where it can, or does not run."""
    can_be_asked: bool
    can_resume: bool
    has_lora: bool
    """Whether it has a LoRA file that can be tried."""
    more: More | None
    """More steps for it; None where it runs, failed or has not begun."""

    @property
    def percent(self) -> int:
        """Share of its steps that are done, up to 100."""
        return min(100, 100 * self.step // self.steps) if self.steps else 0


def job_view(studio: Studio, run_id: str, *, level: str = LEVELS[0]) -> JobView:
    """The page of the run with that id, its log from `level` up.

    Raises UnknownIdError, DataError where its settings are damaged, StorageError.
    """
    folder = run_folder(studio, run_id)
    run = read_run(folder)
    runs, columns = run.state is State.RUNNING, _columns(run)
    obstacle = control.obstacle(folder, run.process) if runs else None
    lines = tuple(_log(studio.runs, folder))
    level = level if level in LEVELS else LEVELS[0]
    pace = next((one.median_step_seconds for one in run.statuses[:1] if one is not None), None)
    hidden = ("family", "method", "state", "exit", "step")
    files = tuple(_file(folder, one) for one in run.files)
    return JobView(
        id=run_id,
        name=name_of(studio.runs, folder),
        folder=str(folder),
        family=run.config.get("family", ""),
        method=run.config.get("method", ""),
        state=state_view(run),
        phases=phases(run),
        step=run.step,
        steps=run.steps,
        seconds_left=max(0, run.steps - run.step) * pace if pace and run.steps else None,
        figures={name: text for name, text in run.figures.items() if text and name not in hidden},
        compared=compared(run),
        end=_end(run, lines),
        warnings=run.plan.warnings if run.plan else (),
        decisions=run.plan.decisions if run.plan else (),
        previews=_by_prompt(run.samples),
        preview_steps=tuple(sorted({one.step for one in run.samples})),
        log=tuple(line for line in lines if _SEVERE.get(line.level, 0) >= LEVELS.index(level))[-_LOG_LINES:],
        level=level,
        columns=columns,
        numbers=_numbers(run, columns),
        checkpoints=tuple((one.step, one.bytes) for one in run.checkpoints),
        files=files,
        result=result_view(run, [line.text for line in lines], files),
        shown=next((one for one in files if one.name == "before_after.png"), None),
        settings=kept_settings(studio, folder),
        damaged_lines=run.damaged_lines,
        requests=tuple(run.requests),
        obstacle=obstacle,
        can_be_asked=runs and obstacle is None,
        can_resume=not runs and _can_resume(run),
        has_lora=bool(lora_files(run.folder)),
        more=more_of(run),
    )


def _file(folder: Path, one: SavedFile) -> FileView:
    return FileView(
        id=identifier(folder, one.path), name=one.path.relative_to(folder).as_posix(), bytes=one.bytes
    )


def _can_resume(run: Run) -> bool:
    """True where a run that has ended has settings to go on with, and did not end well."""
    unfinished = run.state in (State.RESUMABLE, State.BEGUN)
    return bool(run.config) and (unfinished or (run.end is not None and run.end.exit_code != ExitCode.OK))


def phases(run: Run) -> tuple[PhaseView, ...]:
    """The parts of the work: those behind the present one are done, of a run that ended well all; none where
    it is not known how far it was.
    """
    if run.phase is None:
        done = run.end is not None and run.end.exit_code == ExitCode.OK
        return tuple(PhaseView(word, "done") for _, word in _BAR if done)
    now = next((place for place, (names, _) in enumerate(_BAR) if run.phase in names), len(_BAR))
    return tuple(
        PhaseView(word, "done" if place < now else "now" if place == now else "next")
        for place, (_, word) in enumerate(_BAR)
    )


def compared(run: Run) -> tuple[Compared, ...]:
    """Step time and memory as the plan predicted them and as they were measured; a CPU's memory is not."""
    plan, last = run.plan, run.last
    predicted = peak = None
    if plan is not None:
        predicted = plan.step_seconds
        peak = sum(row.bytes for row in plan.memory.get("train", ())) or None
    measured = [seconds for _, seconds in run.series("seconds_per_step")[1:]]
    return (
        Compared("Step", predicted, sorted(measured)[len(measured) // 2] if measured else None, "s"),
        Compared(
            "Host memory" if _on_cpu(run) else "GPU memory",
            peak,
            last.get("device_memory_reserved_peak_bytes") or None,
            "bytes",
        ),
    )


def _on_cpu(run: Run) -> bool:
    """True for a run that was planned for a CPU."""
    return run.plan is not None and run.plan.device == "cpu"


def _columns(run: Run) -> dict[str, str]:
    return {name: title for name, title in _NUMBERS.items() if name != _RESERVED or not _on_cpu(run)}


def _end(run: Run, lines: Sequence[LogLine]) -> EndView | None:
    if run.end is None or run.end.exit_code == ExitCode.OK:
        return None
    stopped = run.end.exit_code == ExitCode.STOPPED
    known = stopped or any(problem.remedy for problem in run.end.problems)
    problems = run.end.problems
    if stopped and problems and problems[0].what == ON_REQUEST:  # the exit code says so
        problems = problems[1:]
    return EndView(
        code=run.end.exit_code,
        meaning=run.end.meaning,
        cause=run.end.cause if not run.end.problems else "",
        problems=problems,
        remedy="" if known else remedy(run.end.exit_code),
        lines=tuple(lines[-_LAST_LINES:]),
    )


def _by_prompt(samples: Sequence[Sample]) -> tuple[tuple[str, tuple[Sample, ...]], ...]:
    rows: dict[int, list[Sample]] = {}
    for one in samples:
        rows.setdefault(one.number, []).append(one)
    return tuple(
        (found[-1].prompt or f"prompt {number}", tuple(found)) for number, found in sorted(rows.items())
    )


def _log(root: Path, folder: Path) -> Iterator[LogLine]:
    for line in tail(root, folder / LOG_FILE, _LOG_BYTES):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            text = "\n".join(str(row[name]) for name in ("message", "traceback") if name in row)
            yield LogLine(_clock(str(row.get("time", ""))), str(row.get("level", "info")), text)


def _clock(time: str) -> str:
    """The time of day of a log's line where this machine is, as all others of the studio."""
    try:
        return datetime.datetime.fromisoformat(time).astimezone().strftime("%H:%M:%S")
    except (ValueError, OverflowError):
        return time[11:19]


def _numbers(run: Run, columns: Iterable[str]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Lines of metrics with one of these values, newest first."""
    rows = [row for row in run.rows if any(row.get(name) is not None for name in columns)]
    return tuple(
        (int(row["step"]), tuple(_cell(name, row.get(name)) for name in columns))
        for row in rows[-_MOST_NUMBERS:][::-1]
    )


def _cell(name: str, value: float | None) -> str:
    if value is None or (name.endswith("_bytes") and not value):
        return ""
    return gib(value) if name.endswith("_bytes") else f"{value:.4g}"
