"""`bench stops FAMILY`: runs of several GPUs that are stopped, gone on with, killed and started by launchers.

    python -m bench stops flux1_dev --base BASE --work DIR --record docs/benchmarks/NAME.json
    python -m bench stops qwen_image --base BASE --work DIR --parts stopped

The shipped configuration with random weights on tests/data/real_shaped, by the command line. `stopped`:
SIGTERM at half of the steps, on with one GPU, SIGTERM again, on with all, to a proved LoRA. `killed`: SIGKILL
of the last rank, on to a proved LoRA, by `--resumed-by` GPUs. `hosts`: each GPU is a stand-in for a host,
with a supervisor of its own; SIGKILL of all that the last one runs, on to a proved LoRA. `launched`: short
runs by torchrun and accelerate launch beside those of `trainer train`; what two equal runs of one GPU differ
by is the measure for the rest. The exit code is 1 where something did not end as it must.
TRAINER_PROFILE=cpu tries it without GPUs.

    python -m bench stops qwen_image --method full --base BASE --work DIR --steps 12

With `--method full` every weight trains, in rows over the GPUs, of which one may hold too little: all go on
after SIGTERM. A checkpoint is written where a run is stopped and never else: it has
four times the model's size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from bench import arguments as types
from bench import hosts, matrix
from bench.processes import REPOSITORY
from bench.record import update_table
from tests.e2e.launching import accelerate, torchrun
from trainer import families
from trainer.config import environment
from trainer.errors import ExitCode
from trainer.machine import description, idle
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics
from trainer.telemetry.status import read_ranks

COLUMNS = (
    *("family", "part", "what", "GPUs", "exit code", "as it must", "steps", "from signal to end"),
    *("ms a step", "last loss", "losses differ by", "LoRA differs by", "said"),
)
KILLED = 128 + signal.SIGKILL
LAUNCHER_FAILED = 1
"""Exit code that launchers make of every other."""
MOST_SECONDS = 10.0
"""From a rank's death to that of all others."""
MOST_SECONDS_OF_HOSTS = 40.0
"""From the loss of a host to the end of all others."""
_PAUSE_SECONDS = 0.1
_SAVES = 8
"""Checkpoints of a long run."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """How one run is started."""

    gpus: int
    steps: int
    launcher: Callable[[list[str]], list[str]] = lambda words: [sys.executable, *words]
    launched: bool = False


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One run that ended."""

    code: int
    seconds: float
    """From the signal to the end of all of its processes; 0.0 without one."""
    said: str
    left: int
    """Ranks that were there a second after what was started had ended."""


class Runs:
    """Starts runs of one configuration."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._work = options.work / f"stops-{options.family}"
        self._work.mkdir(exist_ok=True)
        cell = matrix.Cell(family=options.family, name="default", features={})
        layer = matrix.layer_of(cell, options.base, options.work)
        (self._work / "layer.yaml").write_text(yaml.safe_dump(layer))
        self._saves = _SAVES if options.method == "lora" else 0
        shipped = REPOSITORY / "train_configs" / f"{options.family}_{options.method}.yaml"
        self._words = ["-m", "trainer", "train", str(shipped), str(self._work / "layer.yaml")]
        self._overrides: Sequence[str] = options.overrides

    def folder(self, name: str) -> Path:
        """Where a run's files lie."""
        return self._work / name

    def fresh(self, name: str, host: int = 0) -> None:
        """Remove what an earlier command left of a run, and on a host."""
        for left in (self.folder(name), hosts.runtime_of(self.folder(f"{name}.runtime"), host)):
            shutil.rmtree(left, ignore_errors=True)
        self.folder(f"{name}.txt").unlink(missing_ok=True)

    def run(
        self,
        name: str,
        start: Start,
        *,
        at_step: int = 0,
        signal_of: Callable[[Path, int], None] | None = None,
    ) -> Ended:
        """One start of the run `name`, to its end; at a step `signal_of` gets its runtime folder and the
        process id of what was started.
        """
        folder, runtime = self.folder(name), self.folder(f"{name}.runtime")
        settings = [f"train.max_train_steps={start.steps}", *self._overrides]
        apart = max(1, start.steps // self._saves) if self._saves else start.steps + 1
        settings += [f"checkpoint.checkpointing_steps={apart}"]
        words = [*self._words, "--output", str(folder)]
        words += [] if start.launched else ["--gpus", str(start.gpus)]
        words += [word for setting in settings for word in ("--set", setting)]
        environ = environment.snapshot() | {"TRAINER_RUNTIME_DIR": str(runtime), "TRAINER_METRICS_PORT": "0"}
        log = self.folder(f"{name}.txt")
        with log.open("ab") as file:
            began = file.tell()
            child = subprocess.Popen(
                start.launcher(words), cwd=REPOSITORY, env=environ, stdout=file, stderr=file
            )
            sent, pids = 0.0, list[int]()
            try:
                if signal_of is not None and _reached(folder / METRICS_LOG, at_step, child):
                    pids = [one.pid for one in read_ranks(runtime) if one is not None]
                    sent = time.monotonic()
                    signal_of(runtime, child.pid)
                code = child.wait()
            finally:
                if child.poll() is None:  # Ctrl-C: the run saves and ends
                    child.terminate()
                    child.wait()
        seconds = time.monotonic() - sent if sent else 0.0
        time.sleep(1.0 if sent else 0.0)  # who has no parent any more is taken away a moment later
        left = sum(_is_there(pid) for pid in pids)
        return Ended(
            code=code, seconds=seconds, said=log.read_bytes()[began:].decode(errors="replace"), left=left
        )

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The trained steps of a run."""
        return [row for row in read_metrics(self.folder(name) / METRICS_LOG) if "seconds_per_step" in row]


def _reached(log: Path, step: int, child: subprocess.Popen[bytes]) -> bool:
    """Wait until the log has that step; False where the run ends before."""
    while child.poll() is None:
        if log.is_file() and any(row["step"] >= step for row in read_metrics(log)):
            return True
        time.sleep(_PAUSE_SECONDS)
    return False


def _is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def terminate(runtime: Path, pid: int) -> None:
    """SIGTERM to what was started."""
    os.kill(pid, signal.SIGTERM)


def kill_last(runtime: Path, pid: int) -> None:
    """SIGKILL to the last rank."""
    last = read_ranks(runtime)[-1]
    assert last is not None, "the run has reported steps"
    os.kill(last.pid, signal.SIGKILL)


# ---- the parts


Row = dict[str, Any]


def stopped(runs: Runs, options: argparse.Namespace) -> Iterator[Row]:
    """Stopped at half by all GPUs, gone on with by one, stopped again, ended by all; or by all alone."""
    every, one = Start(gpus=options.gpus, steps=options.steps), Start(gpus=1, steps=options.steps)
    half, later = options.steps // 2, options.steps * 3 // 4
    runs.fresh("stopped")
    for start, step in ((every, half), (one, later)) if options.method == "lora" else ((every, half),):
        ended = runs.run("stopped", start, at_step=step, signal_of=terminate)
        fine = ended.code == ExitCode.STOPPED and ended.left == 0
        what = f"SIGTERM at step {step}"
        yield _row(runs, "stopped", what, start, ended, fine=fine, word="stopped on request")
    yield _to_the_end(runs, "stopped", every)


def killed(runs: Runs, options: argparse.Namespace) -> Iterator[Row]:
    """The last rank is killed, and the run gone on with."""
    every = Start(gpus=options.gpus, steps=options.steps)
    runs.fresh("killed")
    ended = runs.run("killed", every, at_step=options.steps // 3, signal_of=kill_last)
    fine = ended.code == KILLED and ended.left == 0 and ended.seconds < MOST_SECONDS
    word = f"rank {options.gpus - 1}: SIGKILL"
    yield _row(runs, "killed", "SIGKILL of the last rank", every, ended, fine=fine, word=word)
    yield _to_the_end(runs, "killed", replace(every, gpus=options.resumed_by or options.gpus))


def lost(runs: Runs, options: argparse.Namespace) -> Iterator[Row]:
    """All that the last host runs is killed, and the run gone on with by all."""
    count = options.gpus
    every = Start(gpus=count, steps=options.steps, launcher=hosts.launcher(count))
    for host in range(count):
        runs.fresh("hosts", host)

    def kill(runtime: Path, pid: int) -> None:
        hosts.kill_host(pid, count - 1)

    ended = runs.run("hosts", every, at_step=options.steps // 3, signal_of=kill)
    fine = ended.code == ExitCode.PEER_LOST and ended.left == 0 and ended.seconds < MOST_SECONDS_OF_HOSTS
    yield _row(runs, "hosts", "SIGKILL of the last host", every, ended, fine=fine, word=f"host {count - 1}")
    yield _to_the_end(runs, "hosts", every)


def _to_the_end(runs: Runs, name: str, start: Start) -> Row:
    ended = runs.run(name, start)
    fine = ended.code == 0 and "resumed from step-" in ended.said and "Proved: " in ended.said
    return _row(runs, name, "gone on with to the end", start, ended, fine=fine, word="resumed from")


def launched(runs: Runs, options: argparse.Namespace) -> Iterator[Row]:
    """Equal runs: twice of one GPU, of all, and of all by launchers."""
    every = Start(gpus=options.gpus, steps=options.short)
    one = replace(every, gpus=1)
    others = ["--main_process_port=0", *(["--multi_gpu"] if options.gpus > 1 else [])]
    ways = {
        "one": one,
        "one again": one,
        "trainer train": every,
        "torchrun": replace(every, launcher=torchrun(options.gpus), launched=True),
        "accelerate launch": replace(every, launcher=accelerate(options.gpus, *others), launched=True),
    }
    compares = False
    for name, start in ways.items():
        if name not in options.starts:
            continue
        runs.fresh(name)
        ended = runs.run(name, start)
        row = _row(runs, "launched", name, start, ended, fine=ended.code == 0, word="Proved: ", name=name)
        row["as it must"] = "yes" if row["as it must"] == "yes" and "Proved: " in ended.said else "no"
        if name == "one":
            compares = row["as it must"] == "yes"
        elif compares and row["as it must"] == "yes":
            row["losses differ by"] = f"{_losses_differ(runs.rows(name), runs.rows('one')):.1e}"
            row["LoRA differs by"] = f"{_adapters_differ(runs.folder(name), runs.folder('one')):.1e}"
        yield row


STARTS = ("one", "one again", "trainer train", "torchrun", "accelerate launch")
"""The starts of `launched`; the others are compared with the first."""
PARTS: Mapping[str, Callable[[Runs, argparse.Namespace], Iterator[Row]]] = {
    "stopped": stopped,
    "killed": killed,
    "hosts": lost,
    "launched": launched,
}


def _row(
    runs: Runs, part: str, what: str, start: Start, ended: Ended, *, fine: bool, word: str, name: str = ""
) -> Row:
    """A row; `said` is the log's last line with `word`, from it on."""
    if not fine:
        print("\n".join(ended.said.strip().splitlines()[-40:]), file=sys.stderr)
    rows = runs.rows(name or part)
    lines = [line[line.index(word) :] for line in ended.said.splitlines() if word in line]
    later = [1e3 * row["seconds_per_step"] for row in rows[-start.steps // 4 :]]
    return {
        "part": part,
        "what": what,
        "GPUs": start.gpus,
        "exit code": ended.code,
        "as it must": "yes" if fine else "no",
        "steps": rows[-1]["step"] if rows else 0,
        "from signal to end": f"{ended.seconds:.1f} s" if ended.seconds else "",
        "ms a step": f"{statistics.median(later):.0f}" if later else "",
        "last loss": f"{rows[-1]['loss']:.6f}" if rows else "",
        "said": lines[-1] if lines else "",
    }


def _losses_differ(ours: Sequence[Row], theirs: Sequence[Row]) -> float:
    """The largest relative difference of two series' losses."""
    pairs = zip(ours, theirs, strict=True)
    return float(max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs))


def _adapters_differ(ours: Path, theirs: Path) -> float:
    """Norm of the difference of two runs' LoRAs, of what grew from zero, over the norm of the second."""
    import torch
    from safetensors.torch import load_file

    def grown(run: Path) -> torch.Tensor:
        tensors = load_file(run / "lora" / f"{run.name}.safetensors")
        return torch.cat([tensors[name].flatten().double() for name in sorted(tensors) if ".lora_B." in name])

    wanted = grown(theirs)
    return float((grown(ours) - wanted).norm() / wanted.norm())


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print a line of JSON a start, and write the record."""
    command = parser()
    options = command.parse_args(arguments)
    if options.method == "full":
        options.parts = options.parts or ("stopped",)
        if options.parts != ("stopped",):
            command.error(
                "--method full has the part `stopped` alone: the others go by checkpoints or adapters"
            )
    options.parts = options.parts or tuple(PARTS)
    options.base = types.require_base(options.base, "--base")
    if environment.read("TRAINER_PROFILE") != "cpu":
        idle.require_gpu(remedy="use a machine with several; TRAINER_PROFILE=cpu tries it on a CPU")
    runs, rows = Runs(options), list[Row]()
    for part in options.parts:
        for row in PARTS[part](runs, options):
            named = options.family if options.method == "lora" else f"{options.family}, full"
            rows.append({"family": named, **row})
            print(json.dumps(rows[-1]), flush=True)
            if options.record:
                write_record(options, rows)
    return int(any(row["as it must"] != "yes" for row in rows))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    one = types.command_parser("stops", __doc__)
    one.add_argument("family", choices=families.names())
    one.add_argument("--base", type=Path, required=True, help="folder with the full-size configs")
    one.add_argument("--work", type=types.folder, required=True, help="for caches and runs")
    one.add_argument("--gpus", type=types.positive, default=2, help="GPUs of the runs of several")
    resumed = "GPUs that go on after a rank was killed; --gpus if not given"
    one.add_argument("--resumed-by", type=types.positive, metavar="N", help=resumed)
    one.add_argument("--steps", type=types.positive, default=120, help="of the runs that are interrupted")
    one.add_argument("--short", type=types.positive, default=10, help="steps of the runs by launchers")
    parts = types.names_of("part", PARTS)
    one.add_argument("--parts", type=parts, default=(), metavar="NAME,NAME", help="all if not given")
    one.add_argument("--method", choices=("lora", "full"), default="lora")
    starts = types.names_of("start", STARTS)
    one.add_argument("--starts", type=starts, default=STARTS, metavar="NAME,NAME", help="of `launched`")
    one.add_argument("--record", type=Path, help="docs/benchmarks/NAME.json, whose other rows stay")
    types.add_common(one, "--set", "--month")
    return one


def write_record(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """The record with these rows in the place of those of the same family, part and start."""
    update_table(
        options.record,
        [tuple(str(row.get(name, "")) for name in COLUMNS) for row in rows],
        keys=4,
        title="Runs of several GPUs, stopped and killed",
        where=description.describe(options.month),
        command="python -m bench stops FAMILY --base BASE --work DIR --record FILE",
        columns=COLUMNS,
    )
