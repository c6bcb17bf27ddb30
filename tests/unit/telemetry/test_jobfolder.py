"""A job's own files: gone when it ends, also when it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer.telemetry.supervising.jobfolder import job_folder

HOUR_AGO = time.time() - 3600


def test_folders_of_living_jobs_stay_and_those_of_killed_ones_go(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from trainer.telemetry.supervising.jobfolder import job_folder
with job_folder(Path({str(tmp_path)!r}), "train") as folder:
    (folder / "spec.json").write_text("{{}}")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    others = [tmp_path / name for name in ("train-notes", "status.json", "my-train-abcdefgh")]
    for path in others:
        path.mkdir()
        os.utime(path, (HOUR_AGO, HOUR_AGO))
    with job_folder(tmp_path, "sample") as living:
        os.utime(living, (HOUR_AGO, HOUR_AGO))
        assert left.exists()  # younger than a minute: its job may be about to lock it
        os.utime(left, (HOUR_AGO, HOUR_AGO))
        with job_folder(tmp_path, "train") as own:
            assert {*tmp_path.iterdir()} == {living, own, *others}
    assert {*tmp_path.iterdir()} == {*others}
