"""Runs on a GPU by the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.contract.runs import ROOT, Case, Workshop


def train(workshop: Workshop, case: Case, folder: Path, gpus: int | str, *overrides: str) -> str:
    """A run of `trainer train` on this machine, proved once; what it said. Its files lie in `folder`/run."""
    config = workshop.write_config(case, folder)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")} | {
        "TRAINER_RUNTIME_DIR": str(folder / "runtime"),
        "TRAINER_CACHE_DIR": str(workshop.cache),
        "TRAINER_METRICS_PORT": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    sets = [part for one in overrides for part in ("--set", one)]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "train", str(config), "--gpus", str(gpus), *sets],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Proved: ") == 1
    return done.stderr
