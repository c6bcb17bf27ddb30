"""Output that nobody reads any more, or never did, does not end the process that writes it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.interpreter import python

WRITES = """
import contextlib, logging, os, sys
from pathlib import Path
from trainer.telemetry import log
from trainer.telemetry.progress import progress
from trainer.telemetry.streams import outlive_readers

folder = Path(sys.argv[1])
outlive_readers(stdout=True)
log.setup(folder)
print("first", file=sys.stderr, flush=True)
sys.stdin.readline()
with progress(3, "steps") as bar:
    for number in range(3):
        bar.advance(text=f"step {number}")
        print("result", flush=True)
        logging.getLogger("trainer.run").info("did %d", number)
with contextlib.suppress(OSError):
    os.write(2, b"native code, too")
print("not flushed")
(folder / "done").touch()
"""


def messages(folder: Path) -> list[str]:
    return [json.loads(line)["message"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_away(stream: str, tmp_path: Path) -> None:
    # both into one pipe, as with 2>&1, or stderr elsewhere
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        python("-c", WRITES, str(tmp_path)),
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs if stream == "stderr" else subprocess.DEVNULL,
    )
    os.close(theirs)
    if stream == "stderr":
        assert os.read(ours, 5) == b"first"
    os.close(ours)
    process.communicate(b"go on\n", timeout=60)
    assert process.returncode == 0
    assert (tmp_path / "done").exists()
    told = messages(tmp_path)
    assert [line for line in told if line.startswith("did")] == ["did 0", "did 1", "did 2"]
    assert f"nobody reads {stream} any more (Broken pipe); the work goes on without it" in told


def test_a_terminal_that_closes(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        python("-c", WRITES, str(tmp_path)), stdin=subprocess.PIPE, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    assert b"first" in os.read(ours, 100)
    os.close(ours)
    process.communicate(b"go on\n", timeout=60)
    assert process.returncode == 0
    assert any(line.startswith("nobody reads stderr any more") for line in messages(tmp_path))


def test_a_full_disk_behind_stderr(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(
            python("-c", WRITES, str(tmp_path)), stdin=subprocess.PIPE, stdout=full, stderr=full
        )
        process.communicate(b"go on\n", timeout=60)
    assert process.returncode == 0
    assert messages(tmp_path) == ["did 0", "did 1", "did 2"]


def test_a_pipe_that_does_not_block_loses_nothing(tmp_path: Path) -> None:
    """Some programs hand their children a stderr that does not block."""
    program = (
        "import os, sys; from trainer.telemetry.streams import outlive_readers\n"
        "outlive_readers(stdout=True); os.set_blocking(2, False); print('x' * 1_000_000, file=sys.stderr)"
    )
    done = subprocess.run(python("-c", program), stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, len(done.stderr)) == (0, 1_000_001)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (1, 2), (0, 1, 2)], ids=str)
def test_streams_that_were_closed_from_the_start(closed: tuple[int, ...], tmp_path: Path) -> None:
    shell = " ".join(f"{descriptor}{'<' if descriptor == 0 else '>'}&-" for descriptor in closed)
    command = f'exec {sys.executable} -c "$0" "$1" {shell}'
    program = WRITES.replace("sys.stdin.readline()", "")
    done = subprocess.run(["bash", "-c", command, program, str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists()
    assert messages(tmp_path) == ["did 0", "did 1", "did 2"]  # and nothing that was meant for stderr
    assert (b"native" in done.stderr) is (2 not in closed)
