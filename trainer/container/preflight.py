"""Reasons to stop a container before anything starts: pure functions from what was read to problems.

Profile, driver, torch and memory are judged where the plan judges them; mounts and folders are judged here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from trainer.container.appliance import MISPLACED, VOLUMES
from trainer.errors import HardwareError, Problem
from trainer.machine.facts import Facts
from trainer.machine.mounts import Mount, holding, is_below
from trainer.machine.profiles import Profile, Selected, select_each
from trainer.planning import torch_and_driver
from trainer.planning.torch_and_driver import require_memory_kind
from trainer.words.sizes import gib

_OWN_LAYER = frozenset({"overlay", "fuse.fuse-overlayfs"})
"""File systems of a container's own layer: of Docker, and of Podman without root."""
_CHOWN_NOTE = "(that is its path on its disk: where you mounted another one, chown that)"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that the command will write to."""

    path: str
    meaning: str
    existing: str
    """The deepest part of the path that exists."""
    owner: int
    """User id of `existing`."""
    error: str
    """Why `existing` cannot be written; empty where it can."""
    is_result: bool = False
    """True for results, which nobody can compute or download again."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Everything that the container was given besides its machine."""

    user: str
    """User and group id, `10001:0`."""
    mounts: tuple[Mount, ...]
    folders: tuple[Folder, ...] = ()
    cudnn: tuple[str, ...] = ()
    """Files of a cuDNN that is not torch's own, in the folders of LD_LIBRARY_PATH."""
    named: str = ""
    """Text with every path that the user wrote: command line, variables, configuration."""


def machine_problems(facts: Facts, requested: str, unified: bool | None) -> tuple[Problem, ...]:
    """Why no run can start on any kind of GPU of this machine with this profile: those of the plan, and
    memory without headroom.

    `unified` is the value of UNIFIED_MEMORY. Raises ConfigError for a profile that does not exist.
    """
    try:
        kinds = select_each(facts, requested)
    except HardwareError as error:
        return error.problems
    found = [_problems_of_kind(kind, unified) for kind in kinds]
    return next((problems for problems in found if not problems), found[0])


def _problems_of_kind(kind: Selected, unified: bool | None) -> tuple[Problem, ...]:
    problems: list[Problem] = []
    for check in (partial(require_memory_kind, unified=unified), torch_and_driver.check):
        try:
            check(kind.facts, kind.profile)
        except HardwareError as error:
            problems += error.problems
    return (*problems, *_headroom(kind.facts, kind.profile))


def container_problems(
    facts: Facts | None, requested: str, surroundings: Surroundings
) -> tuple[Problem, ...]:
    """Variables and mounts because of which a run cannot start. `facts` is None where they cannot be read, or
    the command needs no machine.
    """
    problems = [*_misplaced(surroundings), *_unwritable(surroundings)]
    # facts that cannot be read may be missing because of it: torch was asked, and aborted
    if surroundings.cudnn and requested != "cpu" and (facts is None or facts.gpus):
        folders = sorted({str(PurePosixPath(file).parent) for file in surroundings.cudnn})
        first = surroundings.cudnn[0]
        problems.append(
            Problem(
                what=f"a foreign cuDNN hides the one that torch brings, and torch aborts: {first}",
                where="LD_LIBRARY_PATH",
                remedy=f"take {' and '.join(folders)} out of it, or unset it",
            )
        )
    return tuple(problems)


def warnings(surroundings: Surroundings) -> Iterator[str]:
    """Folders in the container's own layer: the run works, and its results are gone with the container."""
    for folder in surroundings.folders:
        mount = holding(folder.existing, surroundings.mounts)
        if folder.is_result and not folder.error and mount is not None and mount.kind in _OWN_LAYER:
            yield (
                f"{folder.path} is not on a mounted folder: what the run writes is gone with the container;"
                f" {_writable_remedy(folder, None, '')}"
            )


def _headroom(facts: Facts, profile: Profile) -> Iterator[Problem]:
    """Memory that is the host's, of which nothing is left beyond what must stay free."""
    memory, headroom = facts.memory, profile.headroom_bytes
    if headroom is None or memory.available_bytes > headroom:
        return
    limit = memory.cgroup_limit_bytes
    raised = f", or raise the container's memory limit of {gib(limit)}" if limit is not None else ""
    yield Problem(
        what=f"{gib(memory.available_bytes)} of {gib(memory.total_bytes)} are available, and"
        f" {gib(headroom)} must stay free for the host: nothing is left to train with",
        where="unified memory" if profile.device == "cuda" else "host memory",
        remedy=f"stop what else uses memory (docker ps, a notebook, a desktop){raised}",
    )


def _misplaced(surroundings: Surroundings) -> Iterator[Problem]:
    """Mounts where other images have their volumes, and which nobody names."""
    access = {volume.path: volume for volume in VOLUMES}
    for mount in surroundings.mounts:
        wrong = next((one for one in MISPLACED if is_below(mount.path, one)), None)
        # whoever writes the path, or one below it, means it
        if wrong is None or re.search(rf"(?<![\w./-]){re.escape(wrong)}(?![\w.-])", surroundings.named):
            continue
        ours = MISPLACED[wrong]
        read_only = ":ro" if access[ours].access == "ro" else ""
        folder = shlex.quote(_disk_path(mount, mount.path) or "FOLDER")
        yield Problem(
            what=f"a folder is mounted here, where nothing looks: {access[ours].meaning} belong on {ours}",
            where=mount.path,
            remedy=f"mount it there: -v {folder}:{ours}{read_only}",
        )


def _unwritable(surroundings: Surroundings) -> Iterator[Problem]:
    """Folders that the command must write to and cannot."""
    user = surroundings.user
    for folder in surroundings.folders:
        if folder.error:
            what = f"{folder.meaning} cannot be written by user {user}: {folder.error}"
            remedy = _writable_remedy(folder, holding(folder.existing, surroundings.mounts), user)
            yield Problem(what=what, where=folder.path, remedy=remedy)


def _writable_remedy(folder: Folder, mount: Mount | None, user: str) -> str:
    if mount is None or mount.path == "/":
        volume = next((one.path for one in VOLUMES if is_below(folder.path, one.path)), folder.path)
        return f'mount a folder there: docker run -v "$PWD{volume}":{volume}'
    if mount.read_only:
        return f"{mount.path} is mounted read-only: mount it without :ro"
    if mount.kind == "tmpfs":
        uid, _, gid = user.partition(":")
        return f"--tmpfs {mount.path}:uid={uid},gid={gid}; in Kubernetes: securityContext.fsGroup"
    path = _disk_path(mount, folder.existing)
    text = f"on the host: sudo chown -R {user} "
    text += f"{shlex.quote(path)} {_CHOWN_NOTE}" if path else f"FOLDER, which is mounted on {mount.path}"
    if folder.owner:
        text += f"; or run as its owner: docker run --user {folder.owner}:0"
    return f"{text}; in Kubernetes: securityContext.fsGroup"


def _disk_path(mount: Mount, path: str) -> str:
    """A path of the container as its disk has it; empty where that says too little to name it to anyone."""
    # a disk that is mounted whole has the root /, and `chown -R` of that would be the host's own root
    if mount.root.count("/") < 2:
        return ""
    return mount.root + path.removeprefix(mount.path)
