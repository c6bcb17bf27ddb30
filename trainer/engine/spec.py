"""The job that the parent hands to the process that trains: one JSON file. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.config.hosts import Hosts
from trainer.files import atomic
from trainer.telemetry.status import rank_folder

SPEC_FILE = "spec.json"
Mode = Literal["train", "cache", "sample", "verify"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of the training process, as its command asks for it."""

    mode: Mode
    lora_file: str = ""
    """The adapter, for `sample` and `verify`; empty for the base model alone."""
    model_folder: str = ""
    """A full fine-tune's model, for `sample`, drawn in the place of an adapter; empty for none."""
    output_file: str = ""
    before_after: bool = False
    """Draw the base model's pictures above the others, for `sample`."""
    try_folder: str = ""
    """Folder of a try, for `sample`: its record says what else is drawn, and its pictures go there."""
    verify: bool = False
    """Compare entries with their checksums, for `cache`."""
    import_folder: str = ""
    """Folder of another trainer's .pt files, for `cache`; empty for none."""
    prune: bool = False
    """Remove the family's entries that this configuration does not use, for `cache`."""


@dataclass(frozen=True, kw_only=True)
class Spec(Job):
    """A job with everything else that the training process needs to do it."""

    config: Mapping[str, Any]
    """The resolved configuration, as `RunConfig.model_dump` gives it; checked once, by the parent."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each key of it was written, for errors."""
    plan_text: str
    """The plan as JSON."""
    runtime_dir: str
    cache_dir: str
    meeting_place: str
    """File by which the ranks of the job find each other; it does not exist before."""
    hosts: int = 1
    """Machines that do the job together."""
    host: int = 0
    """Number of this one."""
    first_rank: int = 0
    """The first of this host's ranks among all."""
    master: str = ""
    """Address of host 0, where several hosts meet."""
    port: int = 0
    supervisor_pid: int | None = None
    """The process that watches; the job ends when it is gone."""

    @property
    def machines(self) -> Hosts:
        """The hosts of the job, and which of them this one is."""
        return Hosts(count=self.hosts, number=self.host, address=self.master, port=self.port)

    @property
    def came_file(self) -> Path:
        """File that this host's first rank makes when it comes to where all meet: from then on it tells its
        errors to other hosts there, before that the supervisor does.
        """
        return Path(self.meeting_place).with_name("came")

    @property
    def met_file(self) -> Path:
        """File that it makes once all have met: from then on other hosts see by themselves how it ends."""
        return Path(self.meeting_place).with_name("met")

    def status_folder(self, rank: int) -> Path:
        """Folder of a rank's status, which counts this host's ranks alone."""
        return rank_folder(Path(self.runtime_dir), rank - self.first_rank)


def write_spec(spec: Spec, path: Path) -> None:
    """Write it where the training process finds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, json.dumps(asdict(spec), default=_as_text))


def _as_text(path: Path) -> str:
    """A path that reading takes for the same one: `~` at the start of a text would become the home folder."""
    return f"./{path}" if str(path).startswith("~") else str(path)


def read_spec(path: Path) -> Spec:
    """Read a file of `write_spec`."""
    return Spec(**json.loads(path.read_text()))
