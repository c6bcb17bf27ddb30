"""One run in processes of its own: started, looked at from outside, ended when this process is asked to."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.config.interpreter import python
from trainer.errors import HardwareError
from trainer.machine import clocks, idle
from trainer.planning.plan import Plan
from trainer.telemetry import locks
from trainer.telemetry.status import BUDGET_SECONDS, LOCK_FILE, Phase

_PAUSE_SECONDS = 0.25
_LOOK_SECONDS = 2.0


@dataclass(eq=False, kw_only=True)
class Watch:
    """Looks at a run from outside: when its first step was logged, and its GPUs while it trains."""

    log: Path
    """Its metrics.jsonl."""
    steps: int
    """Steps of the run: what comes after them is not training."""
    gpus: Sequence[str]
    """Names for nvidia-smi."""
    read: Callable[[str], clocks.Look | None] = clocks.look
    first_step_seconds: float | None = None
    looks: list[clocks.Look] = field(default_factory=list)
    problem: str = ""
    """Why the GPUs were not watched to the end."""
    _began: float = field(default_factory=time.monotonic, init=False)
    _looked: float = field(default=0.0, init=False)

    def look(self) -> None:
        """Look once; the GPUs every two seconds at most: asking takes a lock of the driver."""
        lines = self.log.read_bytes().count(b"\n") if self.log.is_file() else 0
        now = time.monotonic()
        if lines and self.first_step_seconds is None:
            self.first_step_seconds = now - self._began
        if not 0 < lines < self.steps or now - self._looked < _LOOK_SECONDS or self.problem:
            return
        self._looked = now
        try:
            found = [self.read(name) for name in self.gpus]
        except HardwareError as error:  # a run that is measured is not ended because of a look
            self.problem = str(error)
            return
        self.looks += [one for one in found if one is not None]


def run(
    words: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    runtime: Path,
    *,
    received: list[tuple[float, int]],
    look: Callable[[], None] = lambda: None,
) -> int:
    """Run `trainer` with these words to its end, its outputs in `log`; the exit code, as a shell reports it.

    The first of the signals in `received` asks it to save and end, another SIGINT kills it; if this process
    is killed, it is asked too. Waits for what outlives it: the training process may still save.
    """
    command = python("-m", "trainer", *words)
    own = {"TRAINER_RUNTIME_DIR": str(runtime), "TRAINER_METRICS_PORT": "0"}
    with log.open("wb") as file:
        # in a group of its own a terminal's Ctrl-C reaches us only
        child = subprocess.Popen(
            python("-m", "trainer.engine.comparing.tied", str(os.getpid()), *command),
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**environ, **own}, process_group=0,
        )  # fmt: skip
    asked = 0
    try:
        while child.poll() is None:
            while asked < len(received):
                child.send_signal(received[asked][1] if asked else signal.SIGTERM)
                asked += 1
            look()
            time.sleep(_PAUSE_SECONDS)
    finally:
        if child.poll() is None:  # a look that failed leaves no run behind
            child.terminate()
            child.wait()
    end = time.monotonic() + BUDGET_SECONDS[Phase.SAVE]
    while locks.is_held(runtime / LOCK_FILE) and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def gpus_of(plan: Plan) -> list[str]:
    """Names for nvidia-smi of the GPUs that a plan trains on; none on a CPU."""
    return idle.names_of(plan.devices) if plan.device == "cuda" else []


def require_idle(gpus: Sequence[str], *, patience: float) -> None:
    """Raise HardwareError where anything else works on one of these GPUs, or nvidia-smi cannot tell."""
    for name in gpus:
        if idle.read_gpu(name) is None:
            raise HardwareError(
                "nobody can tell whether anything else works on it: there is no nvidia-smi",
                where=f"GPU {name}",
                remedy="containers have it with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            )
        idle.require_idle(patience=patience, read=functools.partial(idle.read_gpu, name))
