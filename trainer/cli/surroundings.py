"""Machine, mounts and folders of this process, judged before a run would fail on them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainer import families
from trainer.cli.targets import nearest
from trainer.config import environment
from trainer.config.reading.load import Loaded
from trainer.config.writing.dump import dump
from trainer.container.appliance import PREFIX, VOLUMES
from trainer.container.preflight import Folder, Surroundings, container_problems, machine_problems
from trainer.errors import ConfigError, HardwareError, Problem, TrainerError
from trainer.machine import torch_build
from trainer.machine.facts import Facts
from trainer.machine.mounts import parse_mounts
from trainer.modeling.base.base import base_at, can_download, local_folder
from trainer.planning import planning

MOUNTINFO = Path("/proc/self/mountinfo")
IMAGE = Path(PREFIX)
"""A folder that our images have."""
_OUTPUT = "/output"
Judged = tuple[Facts | None, list[TrainerError], Surroundings]
"""The machine's facts where they are needed and can be read, an error for each kind of problem with the
machine's first, and what the container was given."""


def machine_judged() -> Judged:
    """Judge this machine for any run; in one of our images its volumes are judged too."""
    volumes = VOLUMES if IMAGE.is_dir() else ()
    folders = (
        _folder(Path(volume.path), volume.meaning, is_result=volume.path == _OUTPUT)
        for volume in volumes
        if volume.access == "rw"
    )
    return _judged(folders, _named((), None), on_machine=True)


def command_judged(name: str, words: Sequence[str], loaded: Loaded | None, *, on_machine: bool) -> Judged:
    """Judge the command `words`, whose name is `name`; the machine only where it computes, `on_machine`."""
    return _judged(_folders(name, loaded), _named(words, loaded), on_machine=on_machine)


def folder_judged(words: Sequence[str], folder: Path, meaning: str) -> Judged:
    """Judge the command `words`, which computes nothing and keeps its state in `folder`."""
    return _judged([_folder(folder, meaning, is_result=True)], _named(words, None), on_machine=False)


def _judged(folders: Iterable[Folder], named: str, *, on_machine: bool) -> Judged:
    surroundings = Surroundings(
        user=f"{os.getuid()}:{os.getgid()}",
        mounts=parse_mounts(MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")),
        folders=tuple(folders),
        cudnn=_foreign_cudnn() if on_machine else (),
        named=named,
    )
    facts: Facts | None = None
    machine: tuple[Problem, ...] = ()
    misnamed: tuple[Problem, ...] = ()
    requested, unified = planning.requested_profile(), environment.switch("UNIFIED_MEMORY")
    if on_machine:
        try:
            facts = planning.machine_facts()
            machine = machine_problems(facts, requested, unified)
        except HardwareError as error:
            machine = error.problems
        except ConfigError as error:
            misnamed = error.problems
    container = (*misnamed, *container_problems(facts, requested, surroundings))
    errors: list[TrainerError] = [HardwareError(machine)] if machine else []
    return facts, [*errors, ConfigError(container)] if container else errors, surroundings


def _folders(name: str, loaded: Loaded | None) -> Iterator[Folder]:
    """The folders that a command writes to."""
    if loaded is None:
        return
    config = loaded.config
    if name == "train":
        yield _folder(config.output_dir, "the run's folder", is_result=True)
    if name in ("train", "cache"):
        yield _folder(environment.cache_dir(config), "the folder of encoded samples")
    family = families.get(config.family)
    components, trained = families.components(family), family.trained_component
    base = base_at(local_folder(config), config, components, trained=trained)
    if base.state != "complete" and can_download(config):
        yield _folder(environment.hub_cache_dir(), "the folder of base models")


def _folder(path: Path, meaning: str, *, is_result: bool = False) -> Folder:
    # a link in the image may lead to a volume
    path = path.expanduser().resolve()
    existing, error = nearest(path)
    here, owner = str(existing), existing.stat().st_uid
    return Folder(
        path=str(path), meaning=meaning, existing=here, owner=owner, error=error, is_result=is_result
    )


def _named(words: Sequence[str], loaded: Loaded | None) -> str:
    """Every path that the user wrote: a mount there is where it belongs."""
    values = (environment.read(variable.name) or "" for variable in environment.VARIABLES)
    return "\n".join([*words, *values, dump(loaded.config) if loaded else ""])


def _foreign_cudnn() -> tuple[str, ...]:
    """Files of cuDNN in the folders of LD_LIBRARY_PATH, other than those beside torch."""
    torch = torch_build.torch_folder()
    places = (environment.read("LD_LIBRARY_PATH") or "").split(":")
    folders = (Path(place).resolve() for place in places if place)
    foreign = (one for one in folders if torch is None or not one.is_relative_to(torch.parent))
    return tuple(str(file) for folder in foreign for file in sorted(folder.glob("libcudnn*.so*")))


def toolkit() -> str:
    """The CUDA toolkit that is installed, in words."""
    folder = Path(environment.read("CUDA_HOME") or "/usr/local/cuda")
    if not (folder / "bin/nvcc").exists():
        return "none, and none is needed"
    found = re.search(r"cuda-([0-9.]+)$", str(folder.resolve()))
    version = f"CUDA {found[1]}" if found else "a CUDA whose version its folder does not tell"
    return f"{version} in {folder}, which training does not use"
