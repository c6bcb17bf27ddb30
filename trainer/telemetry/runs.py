"""Finished and running runs by their folders: settings, figures and losses by step."""

from __future__ import annotations

import enum
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.reading import strict_yaml
from trainer.config.reading.paths import differences
from trainer.config.tree import walk
from trainer.errors import ConfigError, DataError, ExitCode
from trainer.files import atomic
from trainer.telemetry import control
from trainer.telemetry.run_folder import results
from trainer.telemetry.run_folder.plan import STEPS, RecordedPlan, read_plan
from trainer.telemetry.run_folder.process import End, Process, end_of, is_running, is_supervised, read_process
from trainer.telemetry.run_folder.results import Checkpoint, Sample, SavedFile
from trainer.telemetry.rundir import CONFIG_FILE as CONFIG_FILE
from trainer.telemetry.sinks.records import METRICS_LOG, SCORES, held_out_line, read_lines
from trainer.telemetry.status import Phase, Status, Verdict, read_ranks, verdict_of_ranks
from trainer.words.sizes import GIB

_DEEPEST = 3
"""Levels of folders that are searched below the one that is named."""


class State(enum.StrEnum):
    """State of a run's folder, from its lock, the end of its last attempt (`Run.end`) and its files."""

    RUNNING = "running"
    FINISHED = "finished"
    FINISHED_EARLY = "finished early"
    RESUMABLE = "resumable"
    BEGUN = "begun"
    """Nothing was saved yet."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as its folder shows it."""

    folder: Path
    config: Mapping[str, str]
    """Every value by dotted key, as its file has it; empty where the run was refused before it wrote one."""
    rows: Sequence[Mapping[str, Any]]
    """Lines of its metrics.jsonl, oldest first: the fields of StepRecord, ValidationRecord, ScoreRecord."""
    losses: Sequence[tuple[int, float]]
    """(step, loss) of every log step, oldest first."""
    held_out: Sequence[tuple[int, float]]
    """(step, loss) of every validation."""
    rounds: Mapping[int, Mapping[str, float]]
    """Held-out loss and metrics of previews of every validation, by step and name; a later line wins."""
    early_stop: str = ""
    """Why it ended before its last planned step; empty where it did not."""
    damaged_lines: int = 0
    """Lines of its metrics that are damaged, and left out."""
    state: State
    process: Process | None
    """The process that trains there, or trained there last; None for runs of older versions."""
    statuses: Sequence[Status | None] = ()
    """Heartbeats of its ranks while it runs, rank 0 first; empty where their folder is not seen from here."""
    health: Verdict | None = None
    """Judgement of these heartbeats at the time of reading."""
    requests: Sequence[control.Request] = ()
    """Requests to it while it runs, and its answers (`control.ask`)."""
    end: End | None = None
    """How its last attempt ended; None while it runs, and where that is not recorded."""
    plan: RecordedPlan | None
    samples: tuple[Sample, ...]
    checkpoints: tuple[Checkpoint, ...]
    files: tuple[SavedFile, ...]
    """Results and records that a user takes away."""

    @property
    def working_folder(self) -> Path | None:
        """The folder that relative paths of its configuration begin at; None where that is not recorded."""
        begins = "" if self.process is None else self.process.working_folder
        return Path(begins) if begins else None

    @property
    def phase(self) -> Phase | None:
        """The part of its work that it does now; None where it does not run, or is not seen."""
        return self.statuses[0].phase if self.statuses and self.statuses[0] is not None else None

    @property
    def step(self) -> int:
        """Optimizer steps done: by the heartbeat once it trains, else by the last log step or checkpoint."""
        status = self.statuses[0] if self.statuses else None
        if status is not None and status.optimizer_step is not None:
            return status.optimizer_step
        return max([int(self.last.get("step", 0)), *(one.step for one in self.checkpoints)])

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole run; None where neither its configuration nor its plan says."""
        return _steps(self.config, self.plan)

    @functools.cached_property
    def last(self) -> Mapping[str, Any]:
        """The last log step's line; empty before there is one."""
        return next((row for row in reversed(self.rows) if "loss" in row), {})

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every line that has a value of this name, such as `seconds_per_step`."""
        return _series(self.rows, name)

    @functools.cached_property
    def figures(self) -> Mapping[str, str]:
        """The cells of its row in `trainer runs list`, by column; empty where nothing is known."""
        return _figures(self)


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its folder's, with what is above it where two would be the same."""
    names = [run.folder.resolve().name for run in runs]
    alone = len(set(names)) == len(names)
    return names if alone else [str(run.folder) for run in runs]


def differing_settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Dotted keys in which the runs' configurations differ -> the text of each, as `paths.differences`; an
    `auto` for which a run's plan decided what another has does not differ from that.
    """
    folders = [run.working_folder for run in runs]
    decided = differences([_decided(run) for run in runs], folders)
    written = differences([run.config for run in runs], folders)
    return {key: texts for key, texts in written.items() if key in decided}


def _decided(run: Run) -> dict[str, str]:
    """The configuration of a run, with its plan's decision in place of each `auto` that has one."""
    chosen = {} if run.plan is None else {row.feature: row.value for row in run.plan.decisions}
    return {
        key: chosen.get(key.rpartition(".")[2], text) if text == "auto" else text
        for key, text in run.config.items()
    }


def find_runs(folder: Path, tell: Callable[[str], None], *, nested: bool = False) -> list[Path]:
    """Folders of runs: `folder` itself, else those below it by name. Raises ConfigError without any.

    A start that was refused in a folder of runs is not taken for a run instead of them. With `nested` those
    below `folder` are found too where it is a run itself. `tell` is told of each folder that may not be
    looked into.
    """
    try:
        found = _at(folder, _DEEPEST, tell, nested=nested) if folder.is_dir() else []
        what = "no run is in this folder" if folder.is_dir() else "no such folder"
    except PermissionError:
        found, what = [], "this user may not look into it"
    if not found:
        remedy = f"name the output_dir of a run, or a folder of several; each has a {CONFIG_FILE}"
        raise ConfigError(what, where=str(folder), remedy=remedy)
    return found


def is_run(folder: Path) -> bool:
    """True if a run wrote into this folder, or was refused in it.

    Raises PermissionError where that may not be asked.
    """
    return (folder / CONFIG_FILE).is_file() or read_process(folder) is not None


def _at(folder: Path, depth: int, tell: Callable[[str], None], *, nested: bool = False) -> list[Path]:
    accepted = (folder / CONFIG_FILE).is_file()
    below = _below(folder, depth, tell) if depth and (nested or not accepted) else []
    return [folder, *below] if accepted else below or [folder] * is_run(folder)


def _below(folder: Path, depth: int, tell: Callable[[str], None]) -> list[Path]:
    found: list[Path] = []
    with os.scandir(folder) as entries:  # the kind of each comes with its name
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for path in (folder / name for name in names):
        try:
            found += _at(path, depth - 1, tell)
        except FileNotFoundError:
            continue  # removed meanwhile
        except PermissionError:
            tell(f"{path}: this user may not look into it")
    return found


def read_run(folder: Path) -> Run:
    """All numbers of a run's folder at this moment. Raises DataError where its settings are damaged,
    StorageError where a file cannot be read.
    """
    with atomic.reading_told(folder / METRICS_LOG):
        found = [row for _, row in read_lines(folder / METRICS_LOG)]
    rows = [row for row in found if row is not None]
    process = read_process(folder)
    running, early = is_running(folder, process), _early_stop(rows)
    statuses = heartbeats(process) if running and process is not None else ()
    end = None if running or process is None else end_of(process)
    with atomic.reading_told(folder):
        checkpoints = results.checkpoints(folder)
        config, saved = _config(folder), [one.step for one in checkpoints]
        step = max([0, *(int(row["step"]) for row in rows[-1:]), *saved])
        plan = read_plan(folder)
        done = bool(early) or step >= (_steps(config, plan) or 0)
        return Run(
            folder=folder,
            config=config,
            rows=rows,
            losses=_series(rows, "loss"),
            held_out=_series(rows, "validation_loss"),
            rounds=_rounds(rows),
            early_stop=early,
            damaged_lines=found.count(None),
            state=State.RUNNING if running else _state(folder, end, step, done, saved, early),
            process=process,
            statuses=statuses,
            health=verdict_of_ranks(statuses, time.monotonic()) if statuses else None,
            requests=control.requests(Path(process.runtime_dir)) if statuses and process else (),
            end=end,
            plan=plan,
            samples=results.samples(folder),
            checkpoints=checkpoints,
            files=results.files(folder),
        )


def _config(folder: Path) -> dict[str, str]:
    """Every value by dotted key; none of a run that was refused before it wrote its configuration."""
    path = folder / CONFIG_FILE
    if not path.exists():
        return {}
    tree, problems = strict_yaml.read(path)
    if tree is None or problems:
        raise DataError(problems or "the file is empty", where=str(path))
    config: dict[str, str] = {}
    # names of layers hold dots: a key cannot be parted again
    for key, node in walk(tree):
        if not isinstance(node.value, dict | list):
            config[".".join(key)] = "null" if node.value is None else str(node.value)
    return config


def heartbeats(process: Process) -> list[Status | None]:
    """Heartbeats of a running process's ranks; none where its runtime folder is not seen from here, or is
    another run's by now.
    """
    found = read_ranks(Path(process.runtime_dir)) if is_supervised(process) else []
    return found if any(one is not None for one in found) else []


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _rounds(rows: Sequence[Mapping[str, float]]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if "validation_loss" not in row and "score_data" not in row:
            continue
        values = {name: row[name] for name in ("validation_loss", *SCORES) if row.get(name) is not None}
        if values:
            found.setdefault(int(row["step"]), {}).update(values)
    return found


def _early_stop(rows: Sequence[Mapping[str, object]]) -> str:
    """Why the run ended early: with more patience one goes on from there, and writes rows of later steps."""
    early = [row for row in rows if "early_stop" in row]
    return str(early[-1]["early_stop"]) if early and early[-1]["step"] == rows[-1]["step"] else ""


def _steps(config: Mapping[str, str], plan: RecordedPlan | None) -> int | None:
    """Optimizer steps by a configuration, or by the plan of a run whose length is written in epochs."""
    text = config.get("train.max_train_steps", "")
    if _epochs(config) is not None:
        counted = None if plan is None else plan.decision(STEPS)
        text = "" if counted is None else counted.value
    return int(text) if text.isascii() and text.isdecimal() else None


def _state(folder: Path, end: End | None, step: int, done: bool, saved: Sequence[int], early: str) -> State:
    """State of a folder in which nothing runs, by the end of its last attempt: a run that went on has its
    result from before. Where no end is recorded, the result says it, of a run that is `done`, unless it is
    a LoRA of an older step.
    """
    if end is not None and end.exit_code is not None:
        finished = end.exit_code == ExitCode.OK
    else:
        of, known = results.lora_step(folder), end is None or done
        finished = results.has_result(folder) and known and (of is None or of >= step)
    if finished:
        return State.FINISHED_EARLY if early else State.FINISHED
    return State.RESUMABLE if saved else State.BEGUN


def _figures(run: Run) -> dict[str, str]:
    """Columns of the table; an empty text where nothing is known."""
    last = run.last
    peak = last.get("device_memory_reserved_peak_bytes", 0)
    held_out = held_out_line(run.rows) or ""
    return {
        "family": run.config.get("family", ""),
        "method": run.config.get("method", ""),
        "state": run.state.value,
        "exit": "" if run.end is None else "lost" if run.end.exit_code is None else str(run.end.exit_code),
        "step": f"{run.step}/{_length(run)}",
        "loss": _short(last.get("loss")),
        "held-out loss": held_out.removeprefix("held-out loss "),
        "s/step": _short(last.get("seconds_per_step")),
        "tokens/s": _whole(last.get("tokens_per_second")),
        "learned/s": _whole(last.get("learned_tokens_per_second")),
        "TFLOP/s": _short(last.get("model_tflops")),
        "MFU": f"{last['mfu']:.0%}" if last.get("mfu") is not None else "",
        "peak GiB": f"{peak / GIB:.1f}" if peak else "",
    }


_ONE = ("1", "1.0")


def _epochs(config: Mapping[str, str]) -> str | None:
    """The length in epochs as it was written; None for one in steps."""
    text = config.get("train.num_train_epochs", "null")
    return None if text == "null" else text


def _length(run: Run) -> str:
    """The run's steps; its epochs as they were written where an older version did not record their steps."""
    epochs = _epochs(run.config)
    if run.steps is not None or epochs is None:
        return run.config.get("train.max_train_steps", "?") if run.steps is None else str(run.steps)
    return f"{epochs} epoch" if epochs in _ONE else f"{epochs} epochs"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
