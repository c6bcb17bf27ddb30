"""bench hosts: each stand-in for a host has its number, its GPUs and a session of its own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from bench import hosts

WRITES = """
import json, os, pathlib, signal, sys, time
environ = {name: os.environ[name] for name in os.environ if name.startswith(("TRAINER_", "CUDA_VISIBLE"))}
number = int(environ["TRAINER_NODE_RANK"])
path = pathlib.Path(sys.argv[1]) / str(number)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75 + number))
path.with_suffix(".new").write_text(json.dumps([os.getpid(), os.getsid(0), environ]))
path.with_suffix(".new").rename(path)
time.sleep(60)
"""


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setenv("TRAINER_METRICS_PORT", "9464")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    return hosts.launcher(2)(["-c", WRITES, str(tmp_path)])


def seen(folder: Path) -> list[tuple[int, int, dict[str, str]]]:
    """Everything that each host wrote down, once both have."""
    end = time.monotonic() + 60
    while not all((folder / name).exists() for name in "01"):
        assert time.monotonic() < end
        time.sleep(0.05)
    return [json.loads((folder / name).read_text()) for name in "01"]


def test_hosts_have_their_place_and_end_together(given: list[str], tmp_path: Path) -> None:
    with subprocess.Popen(given) as launched:
        (first, _, one), (_, session, two) = seen(tmp_path)
        launched.terminate()
        assert launched.wait(60) == 75, "that of host 0"
    assert session not in (first, os.getsid(0)), "a session of its own"
    assert (one["TRAINER_NODE_RANK"], two["TRAINER_NODE_RANK"]) == ("0", "1")
    assert one["TRAINER_NODES"] == two["TRAINER_NODES"] == "2"
    assert one["TRAINER_MASTER"] == two["TRAINER_MASTER"]
    assert (one["CUDA_VISIBLE_DEVICES"], two["CUDA_VISIBLE_DEVICES"]) == ("3,5", "6,7")
    assert (one["TRAINER_RUNTIME_DIR"], two["TRAINER_RUNTIME_DIR"]) == (f"{tmp_path}/rt", f"{tmp_path}/rt-1")
    assert (one["TRAINER_METRICS_PORT"], two["TRAINER_METRICS_PORT"]) == ("9464", "0")


def test_a_host_is_killed_with_all_that_it_runs(given: list[str], tmp_path: Path) -> None:
    with subprocess.Popen(given) as launched:
        (first, *_), (second, *_) = seen(tmp_path)
        hosts.kill_host(launched.pid, 1)
        end = time.monotonic() + 60
        while Path(f"/proc/{second}/stat").exists() and " Z " not in Path(f"/proc/{second}/stat").read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert Path(f"/proc/{first}").exists()
        launched.terminate()
        assert launched.wait(60) == 75
