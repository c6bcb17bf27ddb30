"""A training process that may start no more threads says so, and records that as its end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from trainer.cli.options import Layers
from trainer.config.interpreter import python
from trainer.engine.spec import Spec, write_spec
from trainer.errors import ExitCode

AT_ITS_LIMIT = """
import sys, threading

def refused(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = refused
from trainer.engine.__main__ import main
sys.exit(main(sys.argv[1]))
"""


def test_a_limit_of_threads_is_told_and_recorded(tmp_path: Path) -> None:
    quickstart, output = Path("train_configs/quickstart.yaml"), tmp_path / "run"
    config = Layers([quickstart], [], Path("examples/style").absolute(), output).load().config
    spec = Spec(
        mode="train", config=config.model_dump(), plan_text="", runtime_dir=str(tmp_path), cache_dir="",
        meeting_place="",
    )  # fmt: skip
    write_spec(spec, tmp_path / "spec.json")
    command = python("-c", AT_ITS_LIMIT, str(tmp_path / "spec.json"))
    result = subprocess.run(command, text=True, capture_output=True)
    assert result.returncode == ExitCode.HARDWARE, result.stderr
    assert "no more processes and threads can be started" in result.stderr
    assert "Traceback" not in result.stderr
    [problem] = json.loads((tmp_path / "error.json").read_text())["problems"]
    assert "ulimit -u" in problem["remedy"]
