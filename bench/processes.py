"""Work in processes of their own: a command, or a function and its answer; several side by side. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from trainer.config import environment

REPOSITORY = Path(__file__).resolve().parent.parent
GIB = 1024**3
T = TypeVar("T")
R = TypeVar("R")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that ended."""

    code: int
    host_gib: float
    """Resident memory of the largest process among it and its own children, at its peak."""
    said: str
    """The text of stdout and stderr, where they went to a log."""
    answer: Any = None
    """The function's return value; None where it failed."""


def run(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    log: Path | None = None,
    *,
    cwd: Path = REPOSITORY,
) -> Ended:
    """Run a command to its end, in the repository; its outputs go to `log`, or to this terminal."""
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(log.open("wb")) if log else None
        child = subprocess.Popen(command, cwd=cwd, env=environ, stdout=file, stderr=file)
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except KeyboardInterrupt:
            child.terminate()  # by its id; the run saves and ends
            child.wait()
            raise
    child.returncode = os.waitstatus_to_exitcode(status)
    said = log.read_text(errors="replace") if log else ""
    return Ended(code=child.returncode, host_gib=usage.ru_maxrss * 1024 / GIB, said=said)


def call(
    job: Callable[..., Any],
    given: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Ended:
    """`job(**given)` in a process of its own; what it returns is the answer. Both are JSON, and paths."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        answer = Path(scratch) / "answer.json"
        task = [f"{job.__module__}:{job.__name__}", json.dumps(dict(given), default=str), str(answer)]
        ended = run([sys.executable, "-m", "bench.processes", *task], environ, log)
        return dataclasses.replace(ended, answer=json.loads(answer.read_text()) if ended.code == 0 else None)


def main(job: str, given: str, answer: str) -> None:
    """Entry point of the process that `call` starts."""
    module, _, name = job.partition(":")
    found = vars(importlib.import_module(module))[name](**json.loads(given))
    Path(answer).write_text(json.dumps(found))


@contextlib.contextmanager
def meanwhile(look: Callable[[], None], pause_seconds: float) -> Iterator[None]:
    """Call `look` again and again in a thread, while the block of the `with` statement runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(pause_seconds):
            look()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def visible() -> list[str]:
    """The GPUs that a run may use, as CUDA_VISIBLE_DEVICES names them; one nameless where there is none."""
    given = environment.snapshot().get(VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",")]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return [""]
    # parts of a divided GPU are listed below it
    found = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(number) for number, _ in enumerate(found)] or [""]


def side_by_side(
    work: Callable[[T, Mapping[str, str]], R], items: Iterable[T], *, jobs: int, gpus: list[str] | None = None
) -> list[R]:
    """`work(item, environ)` for each item, `jobs` at a time; `environ` shows each its GPU only.

    GPUs are dealt out in turn: no more jobs than GPUs means that each run is alone on its own.
    """
    names = gpus or visible()
    free: SimpleQueue[str] = SimpleQueue()
    for number in range(jobs):
        free.put(names[number % len(names)])

    def one(item: T) -> R:
        gpu = free.get()
        try:
            return work(item, {**environment.snapshot(), **({VISIBLE: gpu} if gpu else {})})
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, items))


if __name__ == "__main__":
    main(*sys.argv[1:])
