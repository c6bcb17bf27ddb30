"""More steps for a run that has ended."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.errors import ExitCode, Problem
from trainer.telemetry.runs import Run, State


@dataclass(frozen=True, kw_only=True)
class More:
    """A run that has ended, as one that may train on with more steps."""

    steps: int
    """Optimizer steps that it has without more."""
    notes: tuple[str, ...]
    """Everything that more steps change beside its length."""
    obstacle: Problem | None = None
    """The reason why it cannot; None where it can."""


def more_of(run: Run) -> More | None:
    """The steps that a run has, to which more can be added; None where it runs, failed or has not begun."""
    finished = run.state in (State.FINISHED, State.FINISHED_EARLY)
    stopped = run.state is State.RESUMABLE and (run.end is None or run.end.exit_code == ExitCode.STOPPED)
    if not run.config or not (finished or stopped):
        return None
    newest = max((one.step for one in run.checkpoints), default=0)
    in_epochs = run.config.get("train.num_train_epochs", "null") != "null"
    obstacle = None
    if not newest:
        obstacle = Problem(what="it has no checkpoint to go on from", remedy="begin a new run like it")
    elif run.early_stop:
        remedy = "begin a new run like it, with more of validation.early_stop.patience or without early_stop"
        obstacle = Problem(what=f"it would end at once, as before: {run.early_stop}", remedy=remedy)
    elif in_epochs and not finished:
        what = "its length is written in epochs, which are not trained yet"
        obstacle = Problem(what=what, remedy="resume it; once it has finished, more steps can be added")
    scheduler = run.config.get("train.lr_scheduler", "constant")
    notes = (
        ("" if scheduler.startswith("constant") else
         f"Its learning rate ({scheduler}) follows the course of the longer run from there on, on which it is"
         " higher than at the end of the shorter one."),
        "Its length was written in epochs, and is a number of steps from there on." if in_epochs else "",
    )  # fmt: skip
    steps = newest if in_epochs else max(newest, run.steps or 0)
    return More(steps=steps, notes=tuple(filter(None, notes)), obstacle=obstacle)
