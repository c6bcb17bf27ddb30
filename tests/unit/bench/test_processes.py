"""Functions in processes of their own: what they are given, their answers, and what is said of a failure."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import processes


def doubled(number: int, path: str) -> dict[str, Any]:
    """A job."""
    if number < 0:
        raise ValueError("a number below 0")
    print("said beside the answer")
    return {"number": 2 * number, "path": path, "process": os.getpid(), "seed": os.environ.get("BENCH_SEED")}


def test_a_function_answers_from_a_process_of_its_own(tmp_path: Path) -> None:
    environ, log = {**os.environ, "BENCH_SEED": "3"}, tmp_path / "log.txt"
    ended = processes.call(doubled, {"number": 4, "path": tmp_path}, environ, log)
    assert (ended.code, ended.said) == (0, "said beside the answer\n")
    assert (ended.answer["number"], ended.answer["path"], ended.answer["seed"]) == (8, str(tmp_path), "3")
    assert ended.answer["process"] != os.getpid() and 0.001 < ended.host_gib < 2


def test_a_failure_has_its_words_and_no_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = {"number": -1, "path": "x"}
    ended = processes.call(doubled, given, log=tmp_path / "log.txt")
    assert (ended.code, ended.answer) == (1, None)
    assert ended.said.endswith("ValueError: a number below 0\n")
    assert processes.call(doubled, given).said == "" and "a number below 0" in capfd.readouterr().err


def test_a_command_runs_in_the_repository(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    ended = processes.run([sys.executable, "-c", "import os; print(os.getcwd()); exit(7)"], log=log)
    assert (ended.code, ended.said) == (7, f"{processes.REPOSITORY}\n")
