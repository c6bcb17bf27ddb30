"""The launcher of a Slurm cluster: sbatch, squeue, scontrol, scancel. All nodes see the run folders."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import environment, launchers
from trainer.config.interpreter import python
from trainer.errors import ConfigError, ExitCode
from trainer.files import atomic
from trainer.queue.clusters import records
from trainer.queue.clusters.client import asked
from trainer.queue.clusters.records import Submitted, require_own_folders
from trainer.queue.launcher import CPU, ENDED, Request, Seen, State, meaning
from trainer.telemetry.run_folder.process import read_process

SCRIPT = Path(__file__).with_name("train.sbatch")
_OWN = "slurm"
"""Folder in the run's with its configuration and what its starts print."""
_COLUMNS = "JobID:|,State:|,exit_code:|,Reason:"
_LAUNCH = "LAUNCH"
"""Variable of the script: the words of the program that trains, one a line, for a path may have blanks."""
_HELD_BY = ("JobHeldUser", "JobHeldAdmin", "held state", "JobHoldMaxRequeue")
"""Parts of reasons for which only a person lets a job start."""
_GPU_RESOURCE = re.compile(r"\b(gpu|shard|mps)\b")
"""Slurm's names for GPUs and for shares of them."""
_VARIABLE = "SBATCH_"
"""Prefix of the variables from which sbatch takes options that are not written."""
_CLOCKS_SECONDS = 60.0
"""By as much clocks of two machines may differ."""
_AGAIN = "; added again, its run goes on from the newest checkpoint"
# fmt: off
_STATES: Mapping[str, Seen] = {
    "CONFIGURING": Seen(state=State.RUNNING, words="Slurm gets its nodes ready"),
    "RUNNING": Seen(state=State.RUNNING),
    "SIGNALING": Seen(state=State.RUNNING),
    "STAGE_OUT": Seen(state=State.RUNNING),
    "COMPLETING": Seen(state=State.STOPPING, words="its processes end"),
    "SUSPENDED": Seen(state=State.HELD, words="suspended by Slurm"),
    "STOPPED": Seen(state=State.HELD, words="suspended by Slurm"),
    "SPECIAL_EXIT": Seen(state=State.HELD, words="held by Slurm for its exit code"),
    "REQUEUED": Seen(state=State.WAITING, words="queued again"),
    "COMPLETED": Seen(state=State.FINISHED, exit_code=ExitCode.OK),
    "CANCELLED": Seen(state=State.FAILED, words=f"cancelled{_AGAIN}"),
    "TIMEOUT": Seen(state=State.FAILED, words=f"its time limit came before it had saved{_AGAIN}"),
    "PREEMPTED": Seen(state=State.FAILED, words=f"preempted, and Slurm did not queue it again{_AGAIN}"),
    "DEADLINE": Seen(state=State.FAILED, words=f"its deadline passed{_AGAIN}"),
    "OUT_OF_MEMORY": Seen(state=State.FAILED, words="it took more memory than Slurm gave it (--mem)"),
    "NODE_FAIL": Seen(state=State.LOST, words=f"a node failed{_AGAIN}"),
    "BOOT_FAIL": Seen(state=State.LOST, words="a node did not start"),
}
# fmt: on
"""Slurm's states -> ours, those apart that its reason or the exit code decides."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A `Launcher` for the cluster that this machine submits to."""

    queue: Path
    """Folder of the queue, for what was submitted."""
    options: Sequence[str] = ()
    """Options of sbatch, which go before ours."""

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Take in all of these jobs or none; their names. Raises ConfigError, StorageError."""
        require_own_folders(self.jobs(), requests)
        if any(map(_names_clusters, (*_own_options(environment.snapshot()), *self.options))):
            what = "jobs of another cluster than this machine's cannot be followed"
            remedy = "set SLURM_CLUSTERS, which all of Slurm's commands read, for this and for later ones"
            raise ConfigError(what, where="--clusters", remedy=remedy)
        taken: list[Submitted] = []
        with contextlib.ExitStack() as undo:
            for request in requests:
                taken.append(self._submitted(request))
                undo.callback(asked, ("scancel", taken[-1].job))
                records.keep(self.queue, taken[-1])
                undo.callback(records.drop, self.queue, taken[-1])
            undo.pop_all()
        return [one.word for one in taken]

    def _submitted(self, request: Request) -> Submitted:
        own = request.run / _OWN
        with atomic.no_space_told(own):
            own.mkdir(parents=True, exist_ok=True)
        config = own / "config.yaml"
        atomic.write_text(config, request.config)
        held, environ = ("--hold",) if request.held else (), environment.snapshot()
        # sbatch replaces % in it
        output = str(own / "output.log").replace("%", "%%")
        words = (f"--job-name={request.name}", f"--chdir={request.working_folder}", f"--output={output}")
        said = asked(
            (
                "sbatch",
                "--parsable",
                "--export=ALL",
                *words,
                *_gpus(request, (*_own_options(environ), *self.options)),
                *held,
                *self.options,
                str(SCRIPT),
                str(config),
            ),
            environment=_for_the_script(environ),
        )
        job = said.strip().partition(";")[0]
        if not job.isdecimal():
            what = f"sbatch said {said.strip()[:80]!r}, and not the number of a job"
            raise ConfigError(what, where="sbatch", remedy="see with squeue whether it was submitted")
        return Submitted(
            launcher="slurm",
            job=job,
            name=request.name,
            group=request.group,
            run=str(request.run),
            folder=str(own),
        )

    def jobs(self) -> list[tuple[Submitted, Seen]]:
        """All jobs that were submitted here, each with its state now."""
        known = records.kept(self.queue, "slurm")
        rows = states(
            asked(("squeue", "--me", "--states=all", "--noheader", f"--Format={_COLUMNS}")) if known else ""
        )
        return [(one, rows.get(one.job) or _gone(one, records.since(self.queue, one))) for one in known]

    def state(self, job: str) -> Seen:
        """The state of a job now."""
        return next(seen for one, seen in self.jobs() if one.job == job)

    def stop(self, job: str) -> None:
        """Ask a run to save and end; it is held then. One that has not begun is held."""
        asked(("scontrol", "hold", job))
        seen = self.state(job).state
        if seen is State.RUNNING and not _has_steps(job):
            # its nodes get ready: no signal would reach anything, and there is nothing to save
            asked(("scontrol", "requeuehold", job))
        elif seen in (State.RUNNING, State.STOPPING):
            # to the steps: the script outlives them, and queues the job again, held
            asked(("scancel", "--signal=TERM", job))

    def hold(self, job: str) -> None:
        """Have a job not start, or not go on, until `release`."""
        asked(("scontrol", "hold", job))

    def release(self, job: str) -> None:
        """Let a held job start, or go on."""
        if self.state(job).state in ENDED:
            raise ConfigError("it has ended", where=f"slurm-{job}", remedy="add its configuration again")
        asked(("scontrol", "release", job))

    def log(self, job: str) -> str:
        """All that its starts printed."""
        (one,) = [one for one in records.kept(self.queue, "slurm") if one.job == job]
        path = Path(one.folder) / "output.log"
        with atomic.reading_told(path):
            return path.read_text(errors="replace") if path.is_file() else ""

    def forget(self, job: str) -> None:
        """Take a job that has ended, or that Slurm does not know, off the list."""
        for one, seen in self.jobs():
            if one.job == job:
                if seen.state not in ENDED:
                    raise ConfigError(f"it is {seen.state}", where=one.word, remedy=f"scancel {job} ends it")
                records.drop(self.queue, one)


def _gpus(request: Request, options: Sequence[str]) -> tuple[str, ...]:
    """The option of sbatch for the job's GPUs; none where the user's `options` name GPUs, for Slurm joins the
    two, or where it computes on the CPU.
    """
    if CPU in request.gpus or _name_gpus(options):
        return ()
    if request.count == 1:
        return ("--gpus-per-node=1",)
    # a written number counts the GPUs of all nodes, which Slurm would take wherever they are free
    return *(() if _name_nodes(options) else ("--nodes=1",)), f"--gpus={request.count}"


def _own_options(environ: Mapping[str, str]) -> list[str]:
    """The options that sbatch takes from variables as SBATCH_GRES, as they would be written."""
    own = {name.removeprefix(_VARIABLE): environ[name] for name in environ if name.startswith(_VARIABLE)}
    return [f"--{name.lower().replace('_', '-')}={value}" for name, value in own.items() if value]


def _names_clusters(option: str) -> bool:
    return option.partition("=")[0] == "--clusters" or option.startswith("-M")


def _name_gpus(options: Sequence[str]) -> bool:
    for option, following in itertools.zip_longest(options, options[1:], fillvalue=""):
        name, _, value = option.partition("=")
        if name.startswith(("--gpus", "-G")):
            return True
        # other resources are named so as well
        if (name == "--gres" or name.startswith("--tres-per-")) and _GPU_RESOURCE.search(value or following):
            return True
    return False


def _name_nodes(options: Sequence[str]) -> bool:
    """Whether the user's options say which nodes, or how many: Slurm refuses two of them with --nodes=1."""
    long = ("--nodes", "--nodelist", "--nodefile", "--ntasks")
    return any(
        option.partition("=")[0] in long or option[:2] in ("-N", "-w", "-F", "-n") for option in options
    )


def _has_steps(job: str) -> bool:
    """Whether a running job has come to a step of its script, which a signal reaches."""
    steps = asked(("squeue", "--steps", f"--jobs={job}", "--noheader", "--format=%i")).split()
    return any(step.rpartition(".")[2].isdecimal() for step in steps)


def states(text: str) -> dict[str, Seen]:
    """The states of jobs by their numbers, from squeue's rows of number, state, exit status and reason."""
    rows: Iterable[list[str]] = (line.split("|", 3) for line in text.splitlines())
    return {row[0].strip(): judged(*(cell.strip() for cell in row[1:])) for row in rows if len(row) == 4}


def judged(word: str, status: str, reason: str) -> Seen:
    """The state of a job by Slurm's word for it, the status that wait(2) gives, and Slurm's reason."""
    held = any(part in reason for part in _HELD_BY)
    if word == "PENDING":
        why = "" if reason in ("", "None") else f"Slurm: {reason}"
        return Seen(state=State.HELD if held else State.WAITING, words=why)
    if word == "RUNNING" and held:
        return Seen(state=State.RUNNING, words="is held when it ends before it is finished")
    if word == "FAILED":
        code = _exit_code(status)
        return Seen(
            state=State.FAILED, words=f"Slurm: {reason}" if code is None else meaning(code), exit_code=code
        )
    return _STATES.get(word) or Seen(state=State.UNKNOWN, words=f"Slurm: {word or 'no word'}, {reason}")


def _exit_code(status: str) -> int | None:
    if not (status.isascii() and status.isdecimal()) or int(status) > 0xFFFF:
        return None
    code = os.waitstatus_to_exitcode(int(status))
    return 128 - code if code < 0 else code


def _gone(one: Submitted, since: float) -> Seen:
    """The state of a job that Slurm has forgotten, as it does some minutes after its end.

    since: when it was submitted, in Unix seconds; an attempt from before is another job's.
    """
    process = read_process(Path(one.run))
    own = process is not None and process.started_unix_seconds > since - _CLOCKS_SECONDS
    code = process.exit_code if process is not None and own else None
    if code == ExitCode.OK:
        return Seen(state=State.FINISHED, exit_code=code)
    if code is not None:
        return Seen(state=State.FAILED, words=f"{meaning(code)}; Slurm no longer knows it", exit_code=code)
    return Seen(state=State.LOST, words=f"Slurm no longer knows it, and it left no exit code{_AGAIN}")


def _for_the_script(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job: this process's, without what would change its configuration or its place."""
    left_out = (*launchers.VARIABLES, "TRAINER_RUNTIME_DIR", "TRAINER_QUEUE_JOB")
    kept = environment.with_absolute_paths(environment.without_settings(environ))
    own = {name: value for name, value in kept.items() if name not in left_out}
    return {_LAUNCH: "\n".join(python("-m", "trainer")), **own}
