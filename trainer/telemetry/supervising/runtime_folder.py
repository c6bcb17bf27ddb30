"""The runtime folder of a run: held by its supervisor, and cleared of what the run before left in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

from trainer.config.secrets import shown
from trainer.errors import Problem
from trainer.telemetry import control, locks, status
from trainer.telemetry.run_folder.process import ERROR_FILE
from trainer.telemetry.sinks.metrics import METRICS_FILE
from trainer.telemetry.status import LOCK_FILE, STATUS_FILE

RUNTIME_DIR_VARIABLE = "TRAINER_RUNTIME_DIR"


def forget(runtime_dir: Path) -> None:
    """Remove what the ranks of a run left in its runtime folder."""
    for name in (STATUS_FILE, METRICS_FILE, ERROR_FILE):
        (runtime_dir / name).unlink(missing_ok=True)
    control.forget(runtime_dir)
    for path in status.rank_folders(runtime_dir)[1:]:
        shutil.rmtree(path, ignore_errors=True)


def require_free(runtime_dir: Path) -> None:
    """Raise ConfigError when another run has the folder now, after waiting for one that ends."""
    with holding(runtime_dir):
        pass


def holding(runtime_dir: Path) -> contextlib.AbstractContextManager[int]:
    """Keep two runs out of one runtime folder; gives the lock's descriptor. Raises as `locks.holding`."""

    def on_wait(text: str) -> None:
        if text:
            say(text)

    return locks.holding(
        runtime_dir / LOCK_FILE,
        supervisor=os.getpid(),
        taken=Problem(
            what=f"{runtime_dir} is used by another run",
            where=RUNTIME_DIR_VARIABLE,
            remedy=f"wait for it, or give this run its own {RUNTIME_DIR_VARIABLE}, and its own"
            " TRAINER_METRICS_PORT (0 opens none)",
        ),
        on_wait=on_wait,
    )


def say(text: str) -> None:
    """Print a line of the supervisor on stderr."""
    with contextlib.suppress(OSError):  # a closed terminal or pipe must not end the run
        print(shown(f"supervisor: {text}"), file=sys.stderr, flush=True)
