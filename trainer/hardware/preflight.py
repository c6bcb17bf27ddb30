"""Floor 2: what stops a container before anything is started: pure functions from what was read to problems.

Profile, driver, torch and memory are judged where the plan judges them; here is what only a container has.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from trainer.config.appliance import MISPLACED, VOLUMES
from trainer.errors import HardwareError, Problem
from trainer.hardware import compatibility
from trainer.hardware.facts import Facts
from trainer.hardware.memory import gib
from trainer.hardware.profiles import Profile, select

_CHOWN_NOTE = "(that is its path on its disk: where you mounted another one, chown that)"


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One mounted file system or folder."""

    path: str
    root: str
    """The folder on its own file system: on most hosts the path that was mounted."""
    kind: str
    """overlay, ext4, tmpfs, ..."""
    read_only: bool


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
    """True for what nobody can compute or download again."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the container was given besides its machine."""

    user: int
    group: int
    mounts: tuple[Mount, ...]
    folders: tuple[Folder, ...] = ()
    cudnn: tuple[str, ...] = ()
    """Files of a cuDNN that is not torch's own, in the folders of LD_LIBRARY_PATH."""
    named: str = ""
    """Text with every path that the user wrote: command line, variables, configuration."""


def parse_mounts(mountinfo: str) -> tuple[Mount, ...]:
    """Mounts from the text of /proc/self/mountinfo, in their order: a later one hides an earlier one."""
    mounts = []
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 6:
            continue
        root, path, options = _unescaped(fields[3]), _unescaped(fields[4]), fields[5].split(",")
        kind, *_, super_options = after.split(" ")
        read_only = "ro" in options or "ro" in super_options.split(",")
        mounts.append(Mount(path=path, root=root, kind=kind, read_only=read_only))
    return tuple(mounts)


def holding(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that a path lies on; None where no root is listed."""
    best: Mount | None = None
    for mount in mounts:
        if _is_below(path, mount.path) and (best is None or len(mount.path) >= len(best.path)):
            best = mount
    return best


def machine_problems(facts: Facts, requested: str, unified: bool | None) -> tuple[Problem, ...]:
    """Why no run can start on this machine with this profile: those of the plan, and memory without headroom.

    `unified` is the value of UNIFIED_MEMORY. Raises ConfigError for a profile that does not exist.
    """
    try:
        profile, _ = select(facts, requested)
    except HardwareError as error:
        return error.problems
    problems: list[Problem] = []
    try:
        require_memory_kind(facts, profile, unified)
    except HardwareError as error:
        problems += error.problems
    try:
        compatibility.check(facts, profile)
    except HardwareError as error:
        problems += error.problems
    return (*problems, *_headroom(facts, profile))


def require_memory_kind(facts: Facts, profile: Profile, unified: bool | None) -> None:
    """Raise HardwareError where UNIFIED_MEMORY says another kind of memory than the run's GPU has."""
    if unified is None:
        return
    gpu = facts.gpus[0] if profile.device == "cuda" else None
    setting = f"UNIFIED_MEMORY={'true' if unified else 'false'}"
    shared = gpu is not None and gpu.integrated
    if unified and not shared:
        why = f"{gpu.name} has memory of its own" if gpu is not None else f"the profile is {profile.name}"
        on_purpose = profile.device == "cpu" and any(one.integrated for one in facts.gpus)
        instead = "set TRAINER_PROFILE to auto, or " if on_purpose else ""
        raise HardwareError(
            f"it requires a GPU that shares its memory with the CPU: {why}",
            where=setting,
            remedy=f"{instead}unset UNIFIED_MEMORY",
        )
    if not unified and gpu is not None and gpu.integrated:
        raise HardwareError(
            f"it excludes {gpu.name}, which shares its memory with the CPU (profile {profile.name})",
            where=setting,
            remedy="unset UNIFIED_MEMORY, or set it to true",
        )


def container_problems(
    facts: Facts | None, requested: str, surroundings: Surroundings
) -> tuple[Problem, ...]:
    """What was set or mounted so that a run cannot start. `facts` is None where they cannot be read, or the
    command needs no machine.
    """
    problems = [*_misplaced(surroundings), *_unwritable(surroundings)]
    # facts that cannot be read may be missing because of it: torch was asked, and aborted
    if requested != "cpu" and (facts is None or facts.gpus):
        problems += _foreign_cudnn(surroundings.cudnn)
    return tuple(problems)


def warnings(surroundings: Surroundings) -> Iterator[str]:
    """What works, but loses what was made: folders in the container's own layer."""
    for folder in surroundings.folders:
        mount = holding(folder.existing, surroundings.mounts)
        if folder.is_result and not folder.error and mount is not None and mount.kind == "overlay":
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


def _foreign_cudnn(files: Sequence[str]) -> Iterator[Problem]:
    if files:
        folders = sorted({str(PurePosixPath(file).parent) for file in files})
        yield Problem(
            what=f"a foreign cuDNN hides the one that torch brings, and torch aborts: {files[0]}",
            where="LD_LIBRARY_PATH",
            remedy=f"take {' and '.join(folders)} out of it, or unset it",
        )


def _misplaced(surroundings: Surroundings) -> Iterator[Problem]:
    """Mounts where other images have their volumes, and which nobody names."""
    access = {volume.path: volume for volume in VOLUMES}
    for mount in surroundings.mounts:
        wrong = next((one for one in MISPLACED if _is_below(mount.path, one)), None)
        if wrong is None or _names(surroundings.named, wrong):
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
    user = f"{surroundings.user}:{surroundings.group}"
    for folder in surroundings.folders:
        if not folder.error:
            continue
        mount = holding(folder.existing, surroundings.mounts)
        yield Problem(
            what=f"{folder.meaning} cannot be written by user {user}: {folder.error}",
            where=folder.path,
            remedy=_writable_remedy(folder, mount, user),
        )


def _writable_remedy(folder: Folder, mount: Mount | None, user: str) -> str:
    if mount is None or mount.path == "/":
        volume = next((one.path for one in VOLUMES if _is_below(folder.path, one.path)), folder.path)
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


def _names(text: str, path: str) -> bool:
    """Whether the path, or one below it, is in the text."""
    return re.search(rf"(?<![\w./-]){re.escape(path)}(?![\w.-])", text) is not None


def _is_below(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(f"{folder}/")


def _unescaped(text: str) -> str:
    r"""Blanks and backslashes are written as \040 and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
