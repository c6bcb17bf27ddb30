"""Settings of a run: its folder's, else those that its newest job of the queue was given, where the run was
refused before it wrote its own.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from trainer.config import environment
from trainer.errors import StorageError
from trainer.queue import jobfiles
from trainer.queue.database import read_jobs
from trainer.telemetry.run_folder.process import working_folder
from trainer.telemetry.rundir import CONFIG_FILE
from trainer.ui.opened import open_below
from trainer.ui.studio import Studio, UnknownIdError

_MOST_BYTES = 1 << 19


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A run's settings as YAML."""

    text: str
    working_folder: Path | None
    """The folder that relative paths begin at; None where that is not recorded."""
    of_job: bool = False
    """Whether they are those of its job, in place of its own."""


def kept_settings(studio: Studio, folder: Path) -> Kept | None:
    """The settings of the run in `folder`; None where nobody kept any."""
    with (
        contextlib.suppress(UnknownIdError),
        open_below(studio.runs, folder / CONFIG_FILE) as file,
    ):
        text = file.read(_MOST_BYTES).decode(errors="replace")
        return Kept(text=text, working_folder=working_folder(folder))
    queue = environment.queue_dir().absolute()
    with contextlib.suppress(StorageError, OSError):  # the queue is told where it is shown
        own = [job for job in read_jobs(queue) if job.run == folder]
        if own:
            newest = max(own, key=lambda job: job.id)
            path = jobfiles.job_folder(queue, newest.id) / jobfiles.CONFIG_FILE
            with path.open("rb") as file:
                text = file.read(_MOST_BYTES).decode(errors="replace")
            return Kept(text=text, working_folder=newest.working_folder, of_job=True)
    return None
