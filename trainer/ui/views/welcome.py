"""The first-run page: what this machine is, folders, base models on this disk, and a first run."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from trainer import families
from trainer.config import environment
from trainer.config.reading import presets
from trainer.config.reading.load import Loaded
from trainer.container.preflight import machine_problems
from trainer.errors import AccessError, ConfigError, HardwareError, Problem
from trainer.families.loading import load_config
from trainer.files import atomic
from trainer.machine.facts import Facts, version_text
from trainer.machine.profiles import select_each
from trainer.modeling.base.base import base_at, local_folder
from trainer.planning import planning
from trainer.queue.adding import request
from trainer.queue.local import users_queue
from trainer.queue.scheduler import is_scheduled
from trainer.ui.studio import Studio
from trainer.ui.views.asked import Asked, loaded_of
from trainer.ui.views.settings import Root, roots
from trainer.words.sizes import gib

SEEN_FILE = "welcomed"
"""File in the studio's folder that tells that the page was read."""
_QUICKSTART = "quickstart"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One fact of this machine; `good` or `waiting`, which is neither an error nor all that can be."""

    name: str
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class BaseView:
    """The base model of a family's shipped configuration."""

    family: str
    name: str
    """Its repository of the hub."""
    licence: str
    state: str
    """`complete`, `partial` or `absent` on this disk."""
    missing: str
    """The first thing that lacks; empty for `complete`."""


@dataclass(frozen=True, kw_only=True)
class WelcomeView:
    """The page."""

    checks: tuple[Check, ...]
    problems: tuple[Problem, ...]
    """Reasons why no run can start here, with remedies; empty where one can."""
    roots: tuple[Root, ...]
    bases: tuple[BaseView, ...]
    folders: tuple[str, ...]
    """Base models right below the studio's root of them."""
    scheduled: bool
    """Whether a process starts what waits in the queue."""
    seen: bool


def was_welcomed(studio: Studio) -> bool:
    """True after the page was left by one of its buttons."""
    return (studio.folder / SEEN_FILE).exists()


def end_welcome(studio: Studio) -> None:
    """Have a login lead to the runs from now on. Raises StorageError."""
    atomic.write_text(studio.folder / SEEN_FILE, "")


def welcome_view(studio: Studio) -> WelcomeView:
    """The page of this machine as it is now. Raises ConfigError for a recorded machine that is damaged."""
    facts = planning.machine_facts(starts=False)
    try:
        problems = machine_problems(facts, planning.requested_profile(), environment.switch("UNIFIED_MEMORY"))
    except ConfigError as error:
        problems = error.problems
    return WelcomeView(
        checks=tuple(_checks(facts)),
        problems=problems,
        roots=roots(studio),
        bases=tuple(_base(name) for name in families.names()),
        folders=_folders(studio.models),
        scheduled=is_scheduled(users_queue().folder),
        seen=was_welcomed(studio),
    )


def add_quickstart(studio: Studio) -> str:
    """Add the quickstart on the tiny base of the package behind all others; the number of its job.

    Raises ConfigError where the shipped configurations are not there, and as `trainer queue add`.
    """
    loaded, problems = loaded_of(studio, Asked(start=_QUICKSTART))
    if loaded is None:
        raise ConfigError(problems)
    queue = users_queue()
    (job,) = queue.submit([request(loaded, planning.machine_facts(), queue.gpus())])
    return job


def _checks(facts: Facts) -> list[Check]:
    """Facts in words; what is wrong with them the problems say."""
    found = [
        Check(
            name=f"GPU {place}",
            kind="good",
            text=f"{gpu.name}, {gib(gpu.total_memory_bytes)}, compute capability"
            f" {version_text(gpu.capability)}{', in use by others' if gpu.in_use else ''}",
        )
        for place, gpu in enumerate(facts.gpus)
    ]
    if not facts.gpus:
        why = facts.gpu_problem or "there is no NVIDIA driver on this machine"
        text = f"{why}. Plans, data sets and all pages work without; the quickstart trains on the CPU"
        found.append(Check(name="GPU", kind="waiting", text=text))
    else:
        driver = f"{version_text(facts.driver)}, for CUDA {version_text(facts.driver_cuda)}"
        found.append(Check(name="Driver", kind="good", text=driver))
    memory, limit = facts.memory, facts.memory.cgroup_limit_bytes
    capped = f"; this container may take {gib(limit)}" if limit is not None else ""
    text = f"{gib(memory.available_bytes)} of {gib(memory.total_bytes)} are available{capped}"
    found.append(Check(name="Memory", kind="good", text=text))
    found.append(Check(name="Processor", kind="good", text=f"{facts.processors}, {facts.architecture}"))
    torch = facts.torch
    text = "is not installed here: runs start elsewhere"
    if torch is not None:
        text = f"{version_text(torch.version)}, " + (
            f"built for CUDA {version_text(torch.cuda)}" if torch.cuda else "built for the CPU alone"
        )
    found.append(Check(name="torch", kind="good" if torch is not None else "waiting", text=text))
    try:
        kinds = select_each(facts, planning.requested_profile())
    except (ConfigError, HardwareError):
        return found  # a problem of the page tells of it
    titles = dict.fromkeys(f"{kind.profile.name}: {kind.profile.title}" for kind in kinds)
    return [*found, Check(name="Profile", kind="good", text="; ".join(titles))]


@functools.cache
def _shipped(family: str) -> Loaded:
    """A configuration of the family as it is shipped; its base is what the page asks for."""
    path = presets.shipped_folder() / f"{family}_lora.yaml"
    return load_config([path], environ=environment.without_settings())


def _base(name: str) -> BaseView:
    family, config = families.get(name), _shipped(name).config
    state, missing = "partial", ""
    try:
        base = base_at(
            local_folder(config), config, families.components(family), trained=family.trained_component
        )
        state, missing = base.state, base.missing_line
    except AccessError as error:
        missing = error.problems[0].what
    repository = config.model.pretrained_model_name_or_path
    return BaseView(
        family=family.title, name=repository, licence=family.licence, state=state, missing=missing
    )


def _folders(models: Path) -> tuple[str, ...]:
    """Folders right below the root that hold a base model by their index."""
    if not os.access(models, os.R_OK | os.X_OK):
        return ()
    indexes = ("model_index.json", "config.json")
    return tuple(
        sorted(
            one.name
            for one in models.iterdir()
            if not one.is_symlink() and any(os.path.isfile(one / index) for index in indexes)  # noqa: PTH113
        )
    )
