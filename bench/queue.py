"""`bench queue FAMILY`: four jobs of the queue over two GPUs, one of which another program uses at first.

    python -m bench queue flux1_dev --base BASE --work DIR --record docs/benchmarks/NAME.json

The shipped configuration with random weights on tests/data/real_shaped, by the command line: `trainer queue
add` for the first GPU, the second, both, and the first again, then `trainer queue run --drain`. Which job is
on which GPU is read twice a second off the environment of all processes of this machine, not off the queue.
The other program goes once the second job trains. The exit code is 1 where two jobs were on one GPU at a
time, one began before its turn or with the other program, or one has no proved LoRA.
TRAINER_PROFILE=cpu tries it without GPUs: all jobs want the CPU, and no other program is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench import arguments as types
from bench import matrix
from bench.processes import REPOSITORY, VISIBLE
from bench.record import update_table
from trainer import families
from trainer.config import environment
from trainer.errors import HardwareError
from trainer.machine import description, idle
from trainer.queue import jobfiles
from trainer.queue.launcher import CPU
from trainer.queue.local import Local, usable_gpus
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics

COLUMNS = ("family", "job", "GPUs", "began", "ended", "exit code", "proved", "steps", "as it must", "said")
FOREIGN = """
import sys, torch
held = torch.zeros(20 << 30, dtype=torch.uint8, device="cuda")
print("there", flush=True)
sys.stdin.read()
"""
"""A program that holds 20 GiB until its stdin is closed."""
_PAUSE_SECONDS = 0.5
Row = dict[str, Any]


def wishes(gpus: Sequence[str]) -> list[tuple[str, ...]]:
    """GPUs that each of the four jobs asks for: of two, or the CPU."""
    first, last = gpus[0], gpus[-1]
    return [(first,), (last,), tuple(dict.fromkeys((first, last))), (first,)]


@dataclass
class Seen:
    """Sightings of the jobs from outside, in seconds since the start."""

    times: dict[int, list[float]] = field(default_factory=dict)
    """Job -> every moment in which a process of it was there."""
    gpus: dict[int, set[str]] = field(default_factory=dict)
    """Job -> GPUs that its processes could see."""
    together: set[tuple[int, int, str]] = field(default_factory=set)
    """Two jobs that were on one GPU in one moment, and the GPU."""

    def add(self, moment: float, processes: Mapping[int, set[str]]) -> None:
        """Note one look: job -> GPUs."""
        for job, gpus in processes.items():
            self.times.setdefault(job, []).append(moment)
            self.gpus.setdefault(job, set()).update(gpus)
            for other, theirs in processes.items():
                self.together |= {(job, other, gpu) for gpu in gpus & theirs if job < other}


def look(queue: Path, proc: Path = Path("/proc")) -> dict[int, set[str]]:
    """Jobs of this queue that have a process now, and the GPUs which those may see."""
    found: dict[int, set[str]] = {}
    for path in proc.glob("[0-9]*/environ"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            entries = path.read_bytes().decode(errors="replace").split("\0")
            environ = dict(entry.partition("=")[::2] for entry in entries if entry)
            runtime = Path(environ.get("TRAINER_RUNTIME_DIR", ""))
            if runtime.name == jobfiles.RUNTIME and runtime.parent.parent == queue / "jobs":
                names = environ.get(VISIBLE, "").split(",")
                found.setdefault(int(runtime.parent.name), set()).update(name or CPU for name in names)
    return found


@contextlib.contextmanager
def foreign(gpu: str) -> Iterator[subprocess.Popen[str]]:
    """The other program on a GPU; closing its stdin ends it."""
    environ = {**environment.snapshot(), VISIBLE: gpu}
    with subprocess.Popen(
        [sys.executable, "-c", FOREIGN],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None and program.stdin is not None
        program.stdout.readline()
        yield program
        program.stdin.close()


@dataclass(kw_only=True)
class Trial:
    """One go of the four jobs."""

    options: argparse.Namespace
    gpus: Sequence[str]
    """UUIDs of the two GPUs; the CPU alone where there are none."""
    work: Path
    seen: Seen = field(default_factory=Seen)
    free: float = 0.0
    """Seconds from the start to the end of the other program."""
    said: str = ""
    """Why the first job waited."""

    def __post_init__(self) -> None:
        self.queue, self.began = self.work / "queue", time.monotonic()
        self.environ = {
            **environment.snapshot(),
            "TRAINER_QUEUE_DIR": str(self.queue),
            "TRAINER_METRICS_PORT": "0",
        }
        self.local = Local(folder=self.queue)

    def run(self) -> list[Row]:
        """Add the jobs, have them run, and judge what was seen."""
        self._add()
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,))
        with contextlib.ExitStack() as there:
            other = there.enter_context(foreign(self.gpus[0])) if len(self.gpus) > 1 else None
            watch.start()
            try:
                words = [sys.executable, "-m", "trainer", "queue", "run", "--drain"]
                with subprocess.Popen(words, cwd=REPOSITORY, env=self.environ) as drain:
                    if other is not None:
                        self._wait_for_second(drain)
                        there.close()
                        self.free = self._now()
            finally:
                over.set()
                watch.join()
        return self.judged()

    def _now(self) -> float:
        return time.monotonic() - self.began

    def _add(self) -> None:
        cell = matrix.Cell(family=self.options.family, name="default", features={})
        layer = matrix.layer_of(cell, self.options.base, self.options.work)
        (self.work / "layer.yaml").write_text(yaml.safe_dump(layer))
        shipped = REPOSITORY / "train_configs" / f"{self.options.family}_lora.yaml"
        settings = [f"train.max_train_steps={self.options.steps}", *self.options.overrides]
        for number, gpus in enumerate(wishes(self.gpus), 1):
            words = ["queue", "add", str(shipped), str(self.work / "layer.yaml"), "--on", ",".join(gpus)]
            words += ["--output", str(self.work / f"job-{number}"), "--name", f"job {number}"]
            words += [word for setting in settings for word in ("--set", setting)]
            words = [sys.executable, "-m", "trainer", *words]
            subprocess.run(words, cwd=REPOSITORY, env=self.environ, check=True)

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_PAUSE_SECONDS):
            self.seen.add(self._now(), look(self.queue))

    def _wait_for_second(self, drain: subprocess.Popen[bytes]) -> None:
        """Until the second job trains; the first one's words of why it waits are kept."""
        while drain.poll() is None and not (self.work / "job-2" / METRICS_LOG).is_file():
            time.sleep(_PAUSE_SECONDS)
        words = [sys.executable, "-m", "trainer", "queue", "list"]
        listed = subprocess.run(words, cwd=REPOSITORY, env=self.environ, check=True, capture_output=True)
        lines = [line for line in listed.stdout.decode().splitlines() if "in use by" in line]
        self.said = " ".join(lines[0].split()) if lines else ""

    def judged(self) -> list[Row]:
        """A row a job."""
        rows, ends = list[Row](), dict[str, float]()
        for number, (job, seen) in enumerate(self.local.jobs(), 1):
            times = self.seen.times.get(job.id, [0.0])
            asked = wishes(self.gpus)[number - 1]
            folder = jobfiles.job_folder(self.queue, job.id)
            run = self.work / f"job-{number}"
            log = self.local.log(str(job.id))
            proved = any((run / "lora").glob("*.safetensors")) and "Proved: " in log
            beside = [one for one in sorted(self.seen.together) if job.id in one[:2]]
            earlier = max([ends.get(gpu, 0.0) for gpu in asked])
            waited = number > 1 or len(self.gpus) == 1 or (times[0] > self.free and bool(self.said))
            fine = proved and waited and not beside and self.seen.gpus.get(job.id) == set(asked)
            rows.append(
                {
                    "job": number,
                    "GPUs": ", ".join(str(self.gpus.index(gpu)) for gpu in asked),
                    "began": f"{times[0]:.0f} s",
                    "ended": f"{times[-1]:.0f} s",
                    "exit code": jobfiles.exit_code(folder, job.start),
                    "proved": "yes" if proved else "no",
                    "steps": self._steps(run),
                    "as it must": "yes" if fine and times[0] > earlier else "no",
                    "said": self.said if number == 1 else seen.words,
                }
            )
            ends |= dict.fromkeys(asked, times[-1])
        return rows

    @staticmethod
    def _steps(run: Path) -> int:
        rows = read_metrics(run / METRICS_LOG)
        return max((row["step"] for row in rows if "seconds_per_step" in row), default=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the four jobs, print a line of JSON for each, and write the record."""
    options = parser().parse_args(arguments)
    options.base = types.require_base(options.base, "--base")
    gpus: tuple[str, ...] = (CPU,)
    if environment.read("TRAINER_PROFILE") != "cpu":
        remedy = "use a machine with two; TRAINER_PROFILE=cpu tries it on a CPU"
        idle.require_gpu(remedy=remedy)
        gpus = tuple(gpu.uuid for gpu in usable_gpus())[:2]
        if len(gpus) < 2:
            raise HardwareError("one GPU alone is visible: no job could have another", remedy=remedy)
    work = options.work / f"queue-{options.family}"
    shutil.rmtree(work, ignore_errors=True)  # runs that go on would show nothing
    work.mkdir()
    rows = [{"family": options.family, **row} for row in Trial(options=options, gpus=gpus, work=work).run()]
    for row in rows:
        print(json.dumps(row), flush=True)
    if options.record:
        update_table(
            options.record,
            [tuple(str(row[name]) for name in COLUMNS) for row in rows],
            keys=2,
            title="Four jobs of the queue over two GPUs",
            where=description.describe(options.month),
            command="python -m bench queue FAMILY --base BASE --work DIR --record FILE",
            columns=COLUMNS,
        )
    return int(any(row["as it must"] != "yes" for row in rows))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    one = types.command_parser("queue", __doc__)
    one.add_argument("family", choices=families.names())
    one.add_argument("--base", type=Path, required=True, help="folder with the full-size configs")
    one.add_argument("--work", type=types.folder, required=True, help="for caches and runs")
    one.add_argument("--steps", type=types.positive, default=6, help="of each job")
    one.add_argument("--record", type=Path, help="docs/benchmarks/NAME.json, whose other rows stay")
    types.add_common(one, "--set", "--month")
    return one
