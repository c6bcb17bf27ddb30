"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from trainer.telemetry import progress as module
from trainer.telemetry.progress import progress

SCRIPT = """
import logging, sys
from trainer.telemetry import log
from trainer.telemetry.progress import progress
log.setup(None)
with progress(4, "training", start=1) as outer:
    outer.advance(1, text="loss 0.41")
    with progress(2, "preview") as inner:
        inner.advance(2)
    logging.getLogger("trainer.engine").info("a line from the log")
    outer.advance(2)
"""


def test_plain_lines_are_few_but_carry_the_news(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress(100, "caching", start=90) as bar:
        bar.advance()  # 91: too soon
        bar.advance(text="loss 0.41")  # 92: news
        now[0] += 11
        bar.advance()  # 93: ten seconds have passed
        bar.advance(6)  # 99
        bar.advance()  # 100: the end
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["caching 92/100  loss 0.41", "caching 93/100", "caching 100/100"]


def test_no_terminal_means_plain_lines_without_rich() -> None:
    script = SCRIPT + "assert 'rich' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[0] == "training 2/4  loss 0.41"
    assert lines[1] == "preview 2/2"
    assert lines[2].endswith("a line from the log")
    assert lines[3] == "training 4/4"


def test_a_terminal_gets_a_bar_with_the_log_above_it() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=theirs, env=environment)
    os.close(theirs)
    shown = bytearray()
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert child.wait(timeout=30) == 0
    text = shown.decode()
    assert "4/4" in text
    assert "loss 0.41" in text
    assert "a line from the log\r\n" in text
    assert "Traceback" not in text
