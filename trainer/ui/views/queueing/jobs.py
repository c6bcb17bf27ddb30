"""The queue on the home page, and what can be asked of a job and of a run."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import environment
from trainer.config.secrets import redacted
from trainer.errors import AccessError, ConfigError, DataError, Problem, StorageError
from trainer.families.loading import load_config
from trainer.files import atomic
from trainer.machine.occupancy import GpuUse
from trainer.planning.planning import machine_facts
from trainer.queue import database, jobfiles
from trainer.queue.adding import request
from trainer.queue.launcher import ALIVE, CPU, ENDED, Request, State
from trainer.queue.local import users_queue
from trainer.queue.overview import Entry, overview
from trainer.queue.scheduler import is_scheduled
from trainer.telemetry.run_folder.process import working_folder
from trainer.telemetry.run_folder.tries import run_of
from trainer.telemetry.rundir import CONFIG_FILE
from trainer.telemetry.runs import read_run
from trainer.ui.looking import Look
from trainer.ui.studio import Studio, UnknownIdError, identifier
from trainer.ui.views.queueing.clusters import ClusterRow, cluster_look, cluster_rows
from trainer.ui.views.queueing.lanes import Lane, lanes
from trainer.ui.views.queueing.more import more_of
from trainer.ui.views.runs import has_page, run_folder
from trainer.ui.views.state import KINDS, StateView
from trainer.words.plurals import numbered

STEPS = "train.max_train_steps"
_MOST_DIGITS = 7
_COMMAND = re.compile(r"[;:,]? ?`trainer queue hold --release`[^;:,]*")
"""The part of a note that says what the button beside it does."""


class Act(enum.StrEnum):
    """A change of a job's place or state."""

    UP = "up"
    DOWN = "down"
    HOLD = "hold"
    RELEASE = "release"
    STOP = "stop"
    FORGET = "forget"


WORDS: Mapping[Act, str] = {
    Act.UP: "Up", Act.DOWN: "Down", Act.HOLD: "Hold", Act.RELEASE: "Go on", Act.STOP: "Stop and save",
    Act.FORGET: "Take off the list",
}  # fmt: skip
"""Words of the buttons."""


@dataclass(frozen=True, kw_only=True)
class GpuChoice:
    """One GPU that a job may be given."""

    uuid: str
    name: str
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class QueueRow:
    """One job that waits, runs, or ended otherwise than well."""

    id: int
    name: str
    group: str
    state: StateView
    gpus: str
    page: str
    """Path of the page of its run or try; empty where its folder does not lie below the studio's root."""
    acts: tuple[Act, ...]
    choices: tuple[GpuChoice, ...] = ()
    """GPUs that it may be given; none where there is nothing to choose, or it runs."""
    count: int = 1
    """GPUs that it takes."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Jobs of one group that follow each other, as one row that opens; or a job that has none."""

    group: str
    """Name of the group; empty where its jobs are rows of their own."""
    rows: tuple[QueueRow, ...]
    first: int = 0
    """Number of the group's first job, which may have finished."""
    states: tuple[str, ...] = ()
    """States of all jobs of the group, those that finished among them."""
    compare: str = ""
    """Path of the page that compares the group's runs; empty where there is one at most."""

    @property
    def words(self) -> str:
        """The number of its jobs in each state: `3 jobs: 1 running, 2 waiting`."""
        states = Counter(self.states)
        each = ", ".join(f"{count} {word}" for word, count in states.items())
        return f"{numbered(len(self.states), 'job')}: {each}"


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """The queue in its order."""

    rows: tuple[QueueRow, ...]
    sections: tuple[Section, ...] = ()
    """The same rows, those of a group together."""
    lanes: tuple[Lane, ...] = ()
    """GPUs and who has them when, where something waits."""
    scheduled: bool
    """Whether a process starts what waits."""
    clusters: tuple[ClusterRow, ...] = ()
    """Jobs that were handed to clusters."""
    problems: tuple[Problem, ...] = ()
    """Why the queue cannot be shown, where it cannot."""

    @property
    def is_empty(self) -> bool:
        """True where there is nothing to show."""
        return not (self.rows or self.clusters or self.problems)

    @property
    def stands_still(self) -> bool:
        """True where something waits and nothing would start it."""
        return not self.scheduled and any(row.state.kind == "waiting" for row in self.rows)


def queue_view(studio: Studio) -> QueueView:
    """All jobs but those that finished, and those of clusters. Changes nothing."""
    queue, problems = users_queue(), list[Problem]()
    clusters, gpus, every = tuple[ClusterRow, ...](), tuple[GpuUse, ...](), list[Entry]()
    try:
        clusters = cluster_rows(studio, queue.folder)
    except StorageError as error:
        problems += error.problems
    try:
        gpus = queue.gpus()
        every = overview(queue, gpus)
    except StorageError as error:
        problems += error.problems
    entries = [entry for entry in every if entry.seen.state is not State.FINISHED]
    places = [entry.job.id for entry in entries if entry.seen.state not in ALIVE | ENDED]
    rows = tuple(_row(studio, entry, places, gpus) for entry in entries)
    return QueueView(
        rows=rows,
        sections=tuple(_sections(studio, rows, every)),
        lanes=lanes(entries, gpus),
        scheduled=is_scheduled(queue.folder),
        clusters=clusters,
        problems=tuple(problems),
    )


def _sections(studio: Studio, rows: Sequence[QueueRow], every: Sequence[Entry]) -> Iterator[Section]:
    for group, some in itertools.groupby(rows, lambda row: row.group):
        together, members = tuple(some), [entry for entry in every if group and entry.job.group == group]
        if len(members) < 2:
            yield from (Section(group="", rows=(row,)) for row in together)
            continue
        shown = [entry.job.run for entry in members if has_page(studio, entry.job.run)]
        words = "&".join(f"run={identifier(studio.runs, run)}" for run in shown)
        compare = f"/compare?{words}" if len(shown) > 1 else ""
        yield Section(
            group=group,
            rows=together,
            first=min(entry.job.id for entry in members),
            states=tuple(entry.seen.state.value for entry in members),
            compare=compare,
        )


def queue_look(studio: Studio) -> Look:
    """A look at all that `queue_view` shows; it works where a job runs, or a cluster is asked. Cheap where no
    job waits or runs: then the queue changes by its database alone.
    """
    queue, clusters = users_queue(), Look(changes=None)
    try:
        clusters = cluster_look(queue.folder)
        # before the jobs are read: what changes in between is seen at the next look
        changes = database.changes(queue.folder)
        if _rests(queue.folder, changes):
            seen = (changes, is_scheduled(queue.folder), clusters.changes)
            return Look(changes=seen, works=clusters.works)
    except StorageError:
        pass  # the view says so
    view = queue_view(studio)
    runs = any(row.state.kind == "running" for row in view.rows)
    return Look(changes=view, works=runs or clusters.works)


_at_rest: dict[Path, bytes | None] = {}
"""Folder of a queue -> its database's `changes` at which no job waited or ran."""


def _rests(folder: Path, changes: bytes | None) -> bool:
    if _at_rest.get(folder, b"") != changes:
        if any(seen.state not in ENDED | {State.HELD} for _, seen in users_queue().jobs()):
            return False
        _at_rest[folder] = changes
    return True


def _row(studio: Studio, entry: Entry, places: Sequence[int], gpus: Sequence[GpuUse]) -> QueueRow:
    """The row of a job; `places` are the numbers of those that wait or are held, in their order."""
    job, state = entry.job, entry.seen.state
    return QueueRow(
        id=job.id,
        name=job.name,
        group=job.group,
        state=StateView(kind=KINDS[state], word=state.value, detail=_COMMAND.sub("", entry.note)),
        gpus=entry.gpus,
        page=_page(studio, entry),
        acts=_acts(state, first=places[:1] == [job.id], last=places[-1:] == [job.id]),
        choices=()
        if state in ALIVE or job.gpus == (CPU,) or len(gpus) <= job.count
        else tuple(
            GpuChoice(uuid=gpu.uuid, name=f"GPU {gpu.index}", chosen=gpu.uuid in job.gpus) for gpu in gpus
        ),
        count=job.count,
    )


def _page(studio: Studio, entry: Entry) -> str:
    run = entry.job.run
    if entry.pictures is None:
        return f"/runs/{identifier(studio.runs, run)}" if has_page(studio, run) else ""
    if not (run.is_relative_to(studio.runs) and run.is_dir()):
        return ""
    return f"/try/{identifier(studio.runs, run_of(run))}/{run.name}"


def _acts(state: State, *, first: bool, last: bool) -> tuple[Act, ...]:
    if state in ALIVE:
        return (Act.STOP,) if state is State.RUNNING else (Act.RELEASE,)
    if state in ENDED:
        return (Act.RELEASE, Act.FORGET)
    moves = ((Act.UP,) if not first else ()) + ((Act.DOWN,) if not last else ())
    return (*moves, Act.HOLD if state is State.WAITING else Act.RELEASE, Act.FORGET)


def assign_job(job: int, gpus: Sequence[str]) -> None:
    """Have a job take these GPUs, by UUID; any without one. Raises as `Local.assign`, UnknownIdError."""
    queue = users_queue()
    if job not in {one.id for one, _ in queue.jobs()}:
        raise UnknownIdError(str(job))
    queue.assign(str(job), tuple(gpus))


def change_job(job: int, act: Act) -> None:
    """Change a job of the queue. Raises ConfigError where it cannot be, UnknownIdError without it."""
    queue, name = users_queue(), str(job)
    order = [one.id for one, seen in queue.jobs() if seen.state not in ALIVE | ENDED]
    if job not in {one.id for one, _ in queue.jobs()}:
        raise UnknownIdError(name)
    place = order.index(job) + 1 if job in order else len(order)
    acts: Mapping[Act, Callable[[], None]] = {
        Act.UP: lambda: queue.move([name], max(1, place - 1)),
        Act.DOWN: lambda: queue.move([name], place + 1),
        Act.HOLD: lambda: queue.hold(name),
        Act.RELEASE: lambda: queue.release(name),
        Act.STOP: lambda: queue.stop(name),
        Act.FORGET: lambda: queue.forget(name),
    }
    acts[act]()


def resume(studio: Studio, run: str) -> None:
    """Have the queue go on with a run that stopped, by the settings that it keeps: by its own job where that
    has these, or by a new one in its place.

    Raises ConfigError where it runs or its settings cannot be used here, and the errors of a plan.
    """
    folder = run_folder(studio, run)
    queue = users_queue()
    own = {job.id: seen for job, seen in queue.jobs() if job.run == folder}
    own = {job: seen for job, seen in own.items() if seen.state is not State.FINISHED}
    newest = max(own, default=0)  # wherever it stands
    if newest and (own[newest].state in ALIVE or _keeps(folder, queue.folder, newest)):
        queue.release(str(newest))
    else:
        queue.submit([_again(folder)], in_place_of=[str(job) for job in own])


def _keeps(run: Path, queue: Path, job: int) -> bool:
    """True unless a run accepted other settings since its job got these."""
    own, accepted = jobfiles.job_folder(queue, job) / jobfiles.CONFIG_FILE, run / CONFIG_FILE
    with atomic.reading_told(own):
        since = accepted.is_file() and accepted.stat().st_mtime_ns > own.stat().st_mtime_ns
        return not since or _settings(own) == _settings(accepted)


def _settings(path: Path) -> list[str]:
    """Lines of a configuration without comments, and without the base's commit, which a run pins."""
    lines = redacted(path.read_text(errors="replace")).splitlines()
    plain = [line.partition("  # ")[0].strip() for line in lines]
    return [line for line in plain if line and not line.startswith("revision:")]


def train_on(studio: Studio, run: str, text: str) -> None:
    """Have the queue go on with a run that has ended, for as many steps more as `text` says, in its folder.

    A job of that run which somebody holds is replaced. Raises ConfigError where the run cannot train on, or
    the text is no number of steps, and the errors of a plan.
    """
    folder = run_folder(studio, run)
    more = more_of(read_run(folder))
    if more is None:
        what, remedy = "a run trains on once it has finished or was stopped", "wait for its end, or resume it"
        raise ConfigError(what, where=folder.name, remedy=remedy)
    if more.obstacle is not None:
        raise ConfigError([dataclasses.replace(more.obstacle, where=folder.name)])
    steps = int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else 0
    if not steps:
        remedy = f"a whole number from 1 to {10**_MOST_DIGITS - 1}"
        raise ConfigError(f'"{text[:40]}" is no number of steps', where="more steps", remedy=remedy)
    wanted = _again(folder, f"{STEPS}={more.steps + steps}", "checkpoint.resume_from_checkpoint=auto")
    queue = users_queue()
    held = [str(job.id) for job, seen in queue.jobs() if job.run == folder and seen.state is State.HELD]
    queue.submit([wanted], in_place_of=held)


def _again(folder: Path, *overrides: str) -> Request:
    """A job that goes on with the run in `folder`, by the settings that it keeps and the values over them.

    Raises the errors of a plan, with the folder that relative paths began at where the run keeps none.
    """
    begins = working_folder(folder)
    loaded = load_config(
        [folder / CONFIG_FILE],
        overrides=overrides,
        output=folder,
        environ=environment.without_settings(),
        working_folder=begins,
    )
    try:
        return request(loaded, machine_facts(), users_queue().gpus(), name=folder.name)
    except (AccessError, DataError) as error:
        if begins is not None:
            raise
        what = f"this run does not record where its relative paths begin: they were taken from {Path.cwd()}"
        remedy = "start the studio in the folder that the run was started in, or the run's own command there"
        raise type(error)([*error.problems, Problem(what=what, where=folder.name, remedy=remedy)]) from error
