"""A run that is in the folder of a new one already: a start there goes on with it."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from trainer.config.reading.load import Loaded
from trainer.errors import ConfigError, TrainerError
from trainer.telemetry.run_folder.results import has_result
from trainer.telemetry.runs import Run, State, is_run, read_run
from trainer.ui.views.state import signature, state_view
from trainer.words.plurals import numbered

TICK = "go on with the run in this folder"


@dataclass(frozen=True, kw_only=True)
class Occupied:
    """The run in the folder of a new one."""

    folder: Path
    text: str
    """The run and how far it is, and what a start there does."""
    refused: bool
    """Whether a start there ends with an error."""

    @property
    def name(self) -> str:
        """The value of the tick: it is of this folder alone."""
        return str(self.folder)


def occupied(loaded: Loaded, steps: int) -> Occupied | None:
    """The run in the folder of a configuration that trains so many steps; None where there is none, or one
    that has not trained.
    """
    folder = Path(os.path.realpath(loaded.config.output_dir))
    try:
        if not is_run(folder):
            return None
        run = _read(folder, signature(folder))
    except PermissionError:  # a start cannot write there either, and says so
        return None
    except TrainerError as error:
        what = error.problems[0].what
        return Occupied(
            folder=folder, text=f"{folder.name} holds a run that cannot be read: {what}.", refused=True
        )
    if run.state is not State.RUNNING and not run.step and not has_result(folder):
        return None
    does, refused = _does(run, loaded, steps)
    done = f"step {run.step}" if run.steps is None else f"step {run.step} of {run.steps}"
    text = f"{folder.name} holds a run: {state_view(run).word}, {done}. {does}."
    return Occupied(folder=folder, text=text, refused=refused)


def require_wanted(found: Occupied | None, ticked: str) -> None:
    """Raise ConfigError for a run in the folder with which nobody wants to go on."""
    if found is None or (ticked == found.name and not found.refused):
        return
    other = "" if found.refused else f", or tick “{TICK}”"
    raise ConfigError(found.text.removesuffix("."), where="output_dir", remedy=f"name another folder{other}")


@functools.lru_cache(maxsize=4)
def _read(folder: Path, changes: tuple[object, ...]) -> Run:
    """The run, which is read anew when its `signature` has changed: a page asks with each key."""
    return read_run(folder)


def _does(run: Run, loaded: Loaded, steps: int) -> tuple[str, bool]:
    """A start in the run's folder in words, and whether it is refused; as `engine.records.resume`."""
    newest = max((one.step for one in run.checkpoints), default=0)
    if loaded.config.checkpoint.resume_from_checkpoint == "never":
        return "A start there is refused: `checkpoint.resume_from_checkpoint` is `never`", True
    if newest > steps:
        return f"A start there is refused: its newest checkpoint is of step {newest}, beyond {steps}", True
    result = "LoRA" if loaded.config.method == "lora" else "model"
    replaced = f", and replaces its {result}" if has_result(run.folder) else ""
    if run.state is State.RUNNING:
        return f"A start there waits for its end, then goes on with it to step {steps}{replaced}", False
    if not newest:
        return f"It has no checkpoint: a start there trains from step 0 to step {steps}{replaced}", False
    if newest == steps:
        trained = f"Its {numbered(steps, 'step is', 'steps are')} trained"
        return f"{trained}: a start there only proves its {result} again{replaced}", False
    return f"A start there goes on with it from step {newest} to step {steps}{replaced}", False
