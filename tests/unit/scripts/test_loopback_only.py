"""Commands that run where the loopback is the whole network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_LOOK = """
import socket
server = socket.create_server(("127.0.0.1", 0))
with socket.create_connection(server.getsockname()):
    print(*[name for _, name in socket.if_nameindex()])
"""


def may_leave() -> bool:
    """Whether util-linux' program may make a network here, which needs root in most places."""
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
    )


def ran(code: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "scripts.loopback_only", sys.executable, "-c", code]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(not may_leave(), reason="no network can be made here")
def test_the_loopback_is_all_that_a_command_sees_and_it_works() -> None:
    found = ran(_LOOK)
    assert (found.returncode, found.stdout, found.stderr) == (0, "lo\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_who_may_not_make_one_is_told_and_the_command_runs() -> None:
    code = "import os; from scripts.loopback_only import main; os.setuid(65534); main(['echo', 'ran'])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "ran\n"
    assert found.stderr == "in the machine's own network (Operation not permitted)\n"


def test_the_exit_code_is_the_command_s() -> None:
    assert ran("raise SystemExit(7)").returncode == 7
