"""Containers that tests start, look at and end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.container.engine import Engine

PATIENCE_SECONDS = 180.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Box:
    """A container that was started."""

    engine: Engine
    name: str

    def inspect(self) -> dict[str, Any]:
        (found,) = json.loads(self.engine.ask("inspect", self.name))
        assert isinstance(found, dict)
        return found

    def log(self) -> str:
        return self.engine.ask("logs", self.name)

    def health(self) -> str:
        return str(self.inspect()["State"]["Health"]["Status"])

    def running(self) -> bool:
        return bool(self.inspect()["State"]["Running"])

    def status(self) -> dict[str, Any]:
        """The heartbeat; empty before the first one, and when the container has ended."""
        answer = self.engine.run("exec", self.name, "cat", "/run/trainer/status.json")
        if answer.returncode != 0:
            return {}
        found = json.loads(answer.stdout)
        assert isinstance(found, dict)
        return found

    def address(self, port: int) -> str:
        """Address of a published port on this machine, HOST:PORT."""
        return self.engine.ask("port", self.name, f"{port}/tcp").splitlines()[0]

    def training_pid(self) -> int:
        """Process id, in the container, of the process that trains; not of its supervisor."""
        return int(self.status()["pid"])

    def step(self) -> int:
        """Step of training; 0 before it, and in previews and checkpoints too."""
        status = self.status()
        return int(status.get("step") or 0) if status.get("phase") == "train" else 0

    def wait_for(self, look: Callable[[], T]) -> T:
        """The first true answer of `look`; fails when the container ends before."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            running = self.running()
            answer = look()
            if answer:
                return answer
            assert running, f"it ended with {self.exit_code()}:\n{self.log()[-4000:]}"
            assert time.monotonic() < end, f"waited in vain:\n{self.log()[-4000:]}"
            time.sleep(0.2)

    def exit_code(self) -> int:
        """Wait for the container; gives its exit code."""
        return int(self.engine.ask("wait", self.name, timeout=PATIENCE_SECONDS))
