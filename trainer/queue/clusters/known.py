"""The launchers of clusters by their names, and the jobs that were handed to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from trainer.errors import ConfigError
from trainer.queue.clusters import records
from trainer.queue.clusters.kueue import Kueue
from trainer.queue.clusters.records import Submitted
from trainer.queue.clusters.slurm import Slurm
from trainer.queue.launcher import Launcher, Seen, State


class Cluster(Launcher, Protocol):
    """A `Launcher` whose jobs and their order are a cluster's."""

    def jobs(self) -> list[tuple[Submitted, Seen]]:
        """All jobs that were submitted here, each with its state now."""
        ...

    def hold(self, job: str) -> None:
        """Have a job not start, or not go on, until `release`."""
        ...

    def release(self, job: str) -> None:
        """Let a held job start, or go on."""
        ...

    def forget(self, job: str) -> None:
        """Take a job that has ended off the list."""
        ...


LAUNCHERS: Mapping[str, Callable[[Path, Sequence[str]], Cluster]] = {
    "slurm": lambda queue, options: Slurm(queue=queue, options=options),
    "kueue": lambda queue, options: Kueue(queue=queue, options=options),
}
"""A launcher by its name, for a queue's folder and the options of the cluster's own client."""


def cluster_of(queue: Path, one: Submitted) -> Cluster:
    """The launcher that a job was handed to. Raises ConfigError for one that is not known here."""
    if one.launcher not in LAUNCHERS:
        remedy = "use the version of the trainer that submitted it"
        raise ConfigError(f"no launcher is called {one.launcher}", where=one.word, remedy=remedy)
    return LAUNCHERS[one.launcher](queue, ())


def overview(queue: Path) -> list[tuple[Submitted, Seen]]:
    """All jobs that were handed to clusters; `unknown` where a cluster does not answer, with why."""
    found: list[tuple[Submitted, Seen]] = []
    for name in dict.fromkeys(one.launcher for one in records.kept(queue)):
        mine = records.kept(queue, name)
        try:
            found += cluster_of(queue, mine[0]).jobs()
        except ConfigError as error:
            words = "; ".join(f"{problem.where}: {problem.what}" for problem in error.problems)
            found += [(one, Seen(state=State.UNKNOWN, words=words)) for one in mine]
    return found
