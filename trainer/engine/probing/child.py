"""A measurement in a process of its own, which answers with lines of JSON: its crash is an answer too.

The process is `python -m trainer.engine.probing`; the parent imports no torch.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.interpreter import python


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Exit code and output of one process."""

    code: int | None
    """Exit code, negative for a signal; None where the time ran out."""
    rows: list[dict[str, Any]]
    """Whole lines of JSON that it printed; other lines are of libraries."""
    errors: str
    """The process's stderr."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurement of one kernel."""

    milliseconds: float
    """Median of forward plus backward."""
    errors: Mapping[str, float]
    """Relative error against float32 of the output and of each gradient, by name."""


class Child:
    """One process, started before it is asked: importing torch takes it seconds."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            python("-m", "trainer.engine.probing"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(environment),
        )

    def ask(self, request: Mapping[str, object], seconds: float) -> Answer:
        """The process's answer to its one request, within `seconds`."""
        code = None
        try:
            output, errors = self._process.communicate(json.dumps(request), timeout=max(seconds, 0.0))
            code = self._process.returncode
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, errors = self._process.communicate()
        lines = [line for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
        return Answer(code=code, rows=[json.loads(line) for line in lines], errors=errors)

    def kill(self) -> None:
        """Kill the process, which another thread may be asking: that one gets its answer at once."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process and wait for its end; does nothing where it has ended already."""
        self.kill()
        self._process.communicate()


def last_words(errors: str) -> str:
    """The last line of stderr that says anything, of at most 200 characters; empty where there is none."""
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else ""
