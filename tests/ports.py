"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(20000, 29000)
"""Ports below those that the system chooses for others meanwhile: a server takes its own late."""
_CHOICE = random.SystemRandom()
"""Not the common one, which libraries for tests give the same seed in every process."""


def free_port() -> int:
    """A port that nothing has now, and that nobody is given meanwhile."""
    while True:
        port = _CHOICE.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
