"""A machine with fake GPUs, and runs that are nothing but the files and locks of a run."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from trainer.machine.occupancy import GpuUse
from trainer.queue import jobfiles
from trainer.queue.database import Machine
from trainer.queue.launcher import Request
from trainer.queue.local import Local, Start

GIB = 1024**3


class CrashError(OSError):
    """The end of a scheduler between its leases and the start."""


@dataclass(eq=False)
class FakeRun:
    """One start of a job: it lives as long as its descriptor of the job's lock is open."""

    start: Start
    folder: Path
    lock: int
    alive: bool = True

    def end(self, code: int | None) -> None:
        """End with an exit code, or as kill -9 of all its processes does."""
        if code is not None:
            jobfiles.write_exit(self.folder, self.start.job.start, code)
        self.alive = False
        os.close(self.lock)


@dataclass(eq=False)
class FakeMachine:
    """The GPUs of a machine, what others do on them, and every run that any queue of it started."""

    uuids: tuple[str, ...]
    foreign: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    identity: Machine = field(default_factory=lambda: Machine(id="machine", boot="boot 1"))
    started: list[FakeRun] = field(default_factory=list)
    crashes: int = 0
    wrong: list[str] = field(default_factory=list)
    """Starts that must not have been."""
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def gpus(self) -> tuple[GpuUse, ...]:
        return tuple(
            GpuUse(
                uuid=uuid,
                index=index,
                name="Fake",
                pids=(self.foreign[uuid],) if uuid in self.foreign else (),
                total_bytes=80 * GIB,
                used_bytes=0,
            )
            for index, uuid in enumerate(self.uuids)
            if uuid not in self.gone
        )

    def live(self) -> list[FakeRun]:
        return [run for run in self.started if run.alive]

    def launch(self, start: Start, folder: Path) -> None:
        with self._guard:
            if self.crashes:
                self.crashes -= 1
                raise CrashError("killed")
            for other in self.live():
                if set(other.start.gpus) & set(start.gpus) or other.start.job.id == start.job.id:
                    self.wrong.append(f"{start} beside {other.start}")
            if set(start.gpus) & (set(self.foreign) | self.gone):
                self.wrong.append(f"{start} on a GPU of others, or one that is gone")
            self.started.append(FakeRun(start, folder, os.dup(start.lock)))
            jobfiles.write_began(folder, start.job.start)


class FakeLocal(Local):
    """The queue with starts that are faked at the last moment: where a process would be started."""

    def __init__(self, folder: Path, machine: FakeMachine) -> None:
        super().__init__(folder=folder, gpus=machine.gpus, machine=lambda: machine.identity)
        self.fake = machine

    def launch(self, start: Start) -> None:
        self.fake.launch(start, jobfiles.job_folder(self.folder, start.job.id))


def wanted(
    name: str, gpus: tuple[str, ...] = (), count: int = 1, *, root: Path = Path("/nowhere"), **rest: object
) -> Request:
    """A request for these GPUs, or any so many, with a run folder of its own."""
    values: dict[str, object] = {"config": f"# {name}\n", "working_folder": Path("/"), **rest}
    return Request(name=name, run=root / name, gpus=gpus, count=len(gpus) or count, **values)  # type: ignore[arg-type]
