"""Arguments of commands that have real runs of a tiny base, and their processes, which are forked.

Runs, and functions in processes of their own, come from a nursery with all of their ranks; that they are
started by Python too is shown by launchers' runs, by `bench train` and by test_processes.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from bench import matrix, ours
from bench.processes import Ended
from tests.e2e.nursery import ALL_RANKS, Forked, Nursery

TOKENS = 32


@pytest.fixture
def given(tiny_flux1_dev: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments, where the data set is of few small pictures."""
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "cache"))
    sets = ours.write_data_set("flux1_dev", tmp_path / "data", resolution=64, tokens=TOKENS)
    monkeypatch.setattr(matrix, "SET", Path(sets["img_dir"]).parent)
    record = ["--record", str(tmp_path / "record.json"), "--month", "2026-11"]
    return ["flux1_dev", "--base", str(tiny_flux1_dev), "--work", str(tmp_path), *record]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """A process that forks what imports torch."""
    made = Nursery({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    yield made
    made.end()


@pytest.fixture
def forking(nursery: Nursery) -> SimpleNamespace:
    """The module `subprocess` for a command that starts Python with an output in a file."""

    def popen(command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], **_: Any) -> Forked:
        assert command[0] == sys.executable
        into = Path(stdout.name)
        return nursery.start(command[1:], {**env, ALL_RANKS: "1"}, stdout=into, with_errors=True)

    return SimpleNamespace(**{**vars(subprocess), "Popen": popen})


@pytest.fixture
def run_forked(nursery: Nursery) -> Callable[..., Ended]:
    """`processes.run` of Python without a log."""

    def run(command: Sequence[str], environ: Mapping[str, str] | None = None, log: None = None) -> Ended:
        assert command[0] == sys.executable and log is None
        ended = nursery.run(command[1:], environ or os.environ)
        print(ended.stdout, ended.stderr, sep="", file=sys.stderr)
        return Ended(code=ended.returncode, host_gib=0.0, said="")

    return run
