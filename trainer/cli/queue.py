"""`trainer queue`: runs that wait for GPUs of this machine, in an order, or for those of a cluster."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from trainer.cli.options import Layers, config_arguments_and_machine
from trainer.cli.output import say, shown_below_options
from trainer.errors import ConfigError, Problem, one_line

if TYPE_CHECKING:
    from trainer.config.reading.load import Loaded
    from trainer.queue.clusters.known import Cluster
    from trainer.queue.local import Local

_UNUSUAL = re.compile(r"[^A-Za-z0-9._+-]+")


@shown_below_options
@click.group()
def queue() -> None:
    """Have runs wait for GPUs of this machine, and start in their order.
    \f
    Examples:
      trainer queue add my.yaml                       # waits for any GPU
      trainer queue add my.yaml --vary lora.rank=8,16,32
      trainer queue run                               # starts what waits, until Ctrl-C; runs outlive it
      trainer queue list
      trainer queue stop 3                            # saves, and is held
      trainer queue hold 3 --release                  # goes on

    Jobs are named by their numbers, their names or the name of a group. TRAINER_QUEUE_DIR says where they are
    kept. docs/queue.md says more.
    """


def _queue() -> Local:
    from trainer.queue.local import users_queue

    return users_queue()


_jobs = click.argument("names", metavar="JOB...", nargs=-1, required=True)


@shown_below_options
@queue.command()
@config_arguments_and_machine
@click.option("--name", help="Name of the job, or of the group; that of the run folder otherwise.")
@click.option(
    "--on", metavar="GPU[,GPU]", help="Take these GPUs, by nvidia-smi's numbers or UUIDs, or cpu; else any."
)
@click.option(
    "--vary",
    metavar="KEY=V1,V2",
    multiple=True,
    help="Add a job with each of these values of a key, as a group, each with a run folder of its own.",
)
@click.option("--held", is_flag=True, help="Do not start it before `trainer queue hold --release`.")
@click.option(
    "--slurm",
    metavar="OPTIONS",
    help="Hand it to Slurm with these options of sbatch; '' where it needs none.",
)
@click.option("--kueue", metavar="FOLDER", help="Hand it to Kueue as this folder's kustomization of a Job.")
def add(
    layers: Layers,
    name: str | None,
    on: str | None,
    vary: tuple[str, ...],
    held: bool,
    slurm: str | None,
    kueue: str | None,
) -> None:
    """Add a run, or a group of runs, behind all others. The configuration is kept as it is now.
    \f
    Examples:
      trainer queue add my.yaml --set train.seed=1 --output /output/seed-1
      trainer queue add my.yaml --on 0,1
      trainer queue add my.yaml --name ranks --vary lora.rank=8,16,32
      trainer queue add my.yaml --slurm="--partition=gpu --cpus-per-task=16 --mem=96G"
      trainer queue add my.yaml --kueue my-run
    """
    from trainer.planning.data_rows import require_dataset
    from trainer.planning.planning import machine_facts
    from trainer.queue.adding import cluster_request, request
    from trainer.queue.scheduler import is_scheduled

    if kueue is None:
        require_dataset(layers.dataset)
    queue, words = _queue(), () if on is None else tuple(word.strip() for word in on.split(","))
    cluster = _cluster(slurm, kueue, words)
    facts, known = (None, ()) if cluster else (machine_facts(), queue.gpus())
    requests = []
    for loaded, title, group in _each_of(layers, vary, name):
        if facts is None:
            own = cluster_request(loaded, name=title, group=group, held=held, shared=kueue is None)
        else:
            own = request(loaded, facts, known, name=title, group=group, on=words, held=held)
        requests.append(own)
    for number, one in zip((cluster or queue).submit(requests), requests, strict=True):
        say(f"job {number}: {one_line(one.name)} -> {one_line(one.run)}")
    if not cluster and not is_scheduled(queue.folder):
        say("note: nothing starts jobs now: `trainer queue run` does", err=True)


def _cluster(slurm: str | None, kueue: str | None, on: Sequence[str]) -> Cluster | None:
    """The launcher of the cluster that was named; None for this machine."""
    from trainer.queue.clusters.known import LAUNCHERS

    if slurm is None and kueue is None:
        return None
    if slurm is not None and kueue is not None:
        raise ConfigError("a job goes to one cluster", where="--slurm, --kueue", remedy="leave one out")
    if on:
        raise ConfigError("a cluster chooses the GPUs itself", where="--on", remedy="leave it out")
    folder = _queue().folder
    if kueue is not None:
        return LAUNCHERS["kueue"](folder, [kueue])
    try:
        return LAUNCHERS["slurm"](folder, shlex.split(slurm or ""))
    except ValueError as error:
        raise ConfigError(f"{error}", where="--slurm", remedy="write it as for a shell") from error


def _each_of(layers: Layers, vary: Sequence[str], name: str | None) -> Iterator[tuple[Loaded, str, str]]:
    """Each job's configuration, its name and that of its group."""
    from trainer.config.reading.load import with_settings

    for varied, suffix in _varied(layers, vary):
        loaded = varied.load()
        run = loaded.config.output_dir.absolute()
        whole = name or run.name
        if suffix:
            loaded = with_settings(loaded, {"output_dir": run.with_name(f"{run.name}-{suffix}")})
        yield loaded, f"{whole}-{suffix}" if suffix else whole, whole if suffix else ""


def _varied(layers: Layers, vary: Sequence[str]) -> Iterator[tuple[Layers, str]]:
    """The layers of each job of a group, and what its name ends with, `rank-8`; of a single job nothing."""
    from trainer.config.reading.varied import overrides_of_each

    if not vary:
        yield layers, ""
    for values in overrides_of_each(vary):
        # lora.rank=8 -> rank-8
        words = [_UNUSUAL.sub("_", value.partition("=")[0].rpartition(".")[2]) for value in values]
        ends = [_UNUSUAL.sub("_", value.partition("=")[2]) for value in values]
        suffix = "-".join(f"{word}-{end}" for word, end in zip(words, ends, strict=True))
        yield dataclasses.replace(layers, overrides=(*layers.overrides, *values)), suffix


@shown_below_options
@queue.command(name="list")
def list_jobs() -> None:
    """List the jobs in their order: state, GPUs, steps, why each waits and about how long.
    \f
    Examples:
      trainer queue list
    """
    from trainer.queue.clusters import known
    from trainer.queue.launcher import State
    from trainer.queue.overview import overview
    from trainer.queue.scheduler import is_scheduled
    from trainer.words.tables import aligned

    local = _queue()
    entries = overview(local)
    rows = [["job", "name", "group", "state", "GPUs", "step", ""]]
    for one in entries:
        step = "" if one.step is None else f"{one.step}/{'?' if one.total is None else one.total}"
        job = one.job
        rows.append([str(job.id), job.name, job.group, one.seen.state, one.gpus, step, one.note])
    for taken, seen in known.overview(local.folder):
        rows.append([taken.word, taken.name, taken.group, seen.state, "", "", seen.words])
    for line in aligned([[one_line(cell) for cell in row] for row in rows]) if rows[1:] else ["no jobs"]:
        say(line)
    if any(one.seen.state is State.WAITING for one in entries) and not is_scheduled(local.folder):
        say("note: nothing starts jobs now: `trainer queue run` does", err=True)


@shown_below_options
@queue.command()
@click.argument("name", metavar="JOB")
@click.argument("place", type=click.IntRange(min=1))
def move(name: str, place: int) -> None:
    """Put a job, or a group in its order, at a place among those that wait or are held; the first is 1.
    \f
    Examples:
      trainer queue move 7 1
    """
    _queue().move(_found_here([name]), place)


@shown_below_options
@queue.command()
@_jobs
@click.option(
    "--on",
    metavar="GPU[,GPU]",
    required=True,
    help="These GPUs, by nvidia-smi's numbers or UUIDs, as many as each takes; or any.",
)
def assign(names: tuple[str, ...], on: str) -> None:
    """Have jobs that do not run wait for other GPUs than they do.
    \f
    Examples:
      trainer queue assign 7 --on 1
      trainer queue assign ranks --on any     # all jobs of the group
    """
    from trainer.queue.adding import uuid_of

    local = _queue()
    known = local.gpus()
    gpus = () if on == "any" else tuple(uuid_of(word.strip(), known) for word in on.split(","))
    _each(lambda _, job: local.assign(job, gpus=gpus), [(local, job) for job in _found_here(names)])


@shown_below_options
@queue.command()
@_jobs
@click.option("--release", is_flag=True, help="Let them start, or go on after they were stopped or failed.")
def hold(names: tuple[str, ...], release: bool) -> None:
    """Have jobs not start before they are released. One that runs goes on, but Kueue's,
    which saves and ends: `stop` ends the others.
    \f
    Examples:
      trainer queue hold 7
      trainer queue hold 7 --release
    """
    _each(lambda queue, job: queue.release(job) if release else queue.hold(job), _found(names))


@shown_below_options
@queue.command()
@_jobs
@click.option("--forget", is_flag=True, help="Take jobs that do not run off the list. Run folders stay.")
def stop(names: tuple[str, ...], forget: bool) -> None:
    """Ask runs to save and end; they are held then, and go on with `hold --release`.
    \f
    Examples:
      trainer queue stop 7
      trainer queue stop ranks            # all jobs of the group
      trainer queue stop 7 --forget
    """
    _each(lambda queue, job: queue.forget(job) if forget else queue.stop(job), _found(names))


@shown_below_options
@queue.command()
@click.argument("name", metavar="JOB")
@click.option("--lines", type=click.IntRange(min=1), default=40, show_default=True, help="How many lines.")
def log(name: str, lines: int) -> None:
    """Print the last lines of what a job printed.
    \f
    Examples:
      trainer queue log 7 --lines 100
    """
    for queue, job in _found([name]):
        for line in queue.log(job).splitlines()[-lines:]:
            say(line)


@shown_below_options
@queue.command()
@click.option("--drain", is_flag=True, help="End when no job waits or runs.")
@click.option(
    "--stop-runs", is_flag=True, help="On SIGTERM or Ctrl-C have the runs it started save first, and wait."
)
def run(drain: bool, stop_runs: bool) -> None:
    """Start the jobs whose turn it is, until Ctrl-C. Runs go on then; several of these at once do no harm.
    \f
    The main process of a container takes all others with it: give it --stop-runs, and 30 minutes to end.

    Examples:
      trainer queue run
      trainer queue run --drain && trainer runs list runs
    """
    from trainer.queue import scheduler
    from trainer.telemetry.supervising.signals import collected

    local = _queue()
    say(f"queue in {local.folder}", err=True)
    with collected() as received:
        tell = functools.partial(say, err=True)
        scheduler.run(local, tell, received=received, drain=drain, stop_runs=stop_runs)
    say(f"no more jobs are started; runs {'go on when they are' if stop_runs else 'go on'}", err=True)


def _each(
    change: Callable[[Local | Cluster, str], None], jobs: Sequence[tuple[Local | Cluster, str]]
) -> None:
    """Change every job that can be changed so; raises ConfigError with all others then."""
    problems: list[Problem] = []
    for queue, job in jobs:
        try:
            change(queue, job)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def _found_here(names: Sequence[str]) -> list[str]:
    """The numbers of such jobs of this machine's queue; raises ConfigError for a cluster's."""
    from trainer.queue.local import Local

    found = _found(names)
    if not all(isinstance(queue, Local) for queue, _ in found):
        remedy = "the cluster's own client knows priorities and options of a job"
        raise ConfigError("its order and its GPUs are the cluster's", where=", ".join(names), remedy=remedy)
    return [job for _, job in found]


def _found(names: Sequence[str]) -> list[tuple[Local | Cluster, str]]:
    """The jobs that these are the numbers of, else the names or groups, in their order: each with its queue.

    Raises ConfigError where a name is none's.
    """
    from trainer.queue.clusters import known, records
    from trainer.words.near import did_you_mean

    local = _queue()
    # number, name and group; the queue by which it is changed, and its name there
    jobs: list[tuple[tuple[str, str, str], tuple[Local | Cluster, str]]] = [
        ((str(job.id), job.name, job.group), (local, str(job.id))) for job, _ in local.jobs()
    ]
    jobs += [
        ((one.word, one.name, one.group), (known.cluster_of(local.folder, one), one.job))
        for one in records.kept(local.folder)
    ]
    found: dict[str, tuple[Local | Cluster, str]] = {}
    for name in names:
        if not name:  # a job without a group has one of this name
            remedy = "name a job; was it meant to come from a variable that is not set?"
            raise ConfigError('expected a job, got ""', where="JOB", remedy=remedy)
        matches = [one for one in jobs if one[0][0] == name] or [one for one in jobs if name in one[0][1:]]
        if not matches:
            near = did_you_mean(name, [word for words, _ in jobs for word in words[1:] if word])
            remedy = f"{near}`trainer queue list` shows all"
            raise ConfigError(f'no job is called "{name}"', where=str(local.folder), remedy=remedy)
        found |= {words[0]: target for words, target in matches}
    return list(found.values())
