"""`trainer preflight`: what a container's entrypoint asks before it starts a command."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.output import say
from trainer.container.appliance import PREFIX

if TYPE_CHECKING:
    from trainer.config.reading.load import Loaded
    from trainer.container.preflight import Folder, Surroundings
    from trainer.errors import Problem, TrainerError
    from trainer.machine.facts import Facts

REPORTED = "probe"
"""The command that a container without one runs: it says itself what would stop a run."""
ON_MACHINE = frozenset({"train", "cache", "sample", "verify-lora"})
"""Commands that compute; with a configuration they have a plan, whose environment their children get."""
IN_CONTAINER = ON_MACHINE | {"fetch", "merge"}
"""Commands whose mounts and folders are checked; all others need nothing of their machine."""
MOUNTINFO = Path("/proc/self/mountinfo")
OUTPUT = "/output"
IMAGE = Path(PREFIX)
"""A folder that our images have."""


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="""\b
Problems go to stderr, with the exit code that they have everywhere.

\b
Examples:
  trainer preflight train my.yaml --output /output/my-lora
  trainer preflight -- "$@" && exec trainer "$@"
""",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def preflight(words: tuple[str, ...]) -> int:
    """Check the machine, the mounts and the plan for the command WORDS, before anything is started."""
    name, *rest = words or (REPORTED,)
    if "--help" in rest:
        return 0
    if name not in IN_CONTAINER:
        return 0
    loaded = _loaded(name, rest)
    if loaded is None and name != "verify-lora":
        return 0  # the command itself says how it is called
    return _checked(name, words, loaded)


def _checked(name: str, words: Sequence[str], loaded: Loaded | None) -> int:
    """Print problems; raises what the plan raises."""
    from trainer.container.preflight import warnings
    from trainer.planning.planning import plan_run, requested_profile

    on_machine = name in ON_MACHINE and loaded is not None
    surroundings = _surroundings(_folders(name, loaded), _named(words, loaded), on_machine=on_machine)
    facts, errors = _judged(surroundings, on_machine=on_machine)
    if errors:
        return _told(errors)
    for warning in warnings(surroundings):
        say(f"warning: {warning}", err=True)
    if facts is not None and loaded is not None:
        plan_run(loaded, facts, requested_profile())
    return 0


def _judged(surroundings: Surroundings, *, on_machine: bool) -> tuple[Facts | None, list[TrainerError]]:
    """The machine's facts where they are needed, and an error for each kind of problem, the machine first."""
    from trainer.config import environment
    from trainer.container.preflight import container_problems, machine_problems
    from trainer.errors import ConfigError, HardwareError
    from trainer.planning.planning import machine_facts, requested_profile

    facts: Facts | None = None
    machine: tuple[Problem, ...] = ()
    misnamed: tuple[Problem, ...] = ()
    requested, unified = requested_profile(), environment.switch("UNIFIED_MEMORY")
    if on_machine:
        try:
            facts = machine_facts()
            machine = machine_problems(facts, requested, unified)
        except HardwareError as error:
            machine = error.problems
        except ConfigError as error:
            misnamed = error.problems
    container = (*misnamed, *container_problems(facts, requested, surroundings))
    errors: list[TrainerError] = [HardwareError(machine)] if machine else []
    return facts, [*errors, ConfigError(container)] if container else errors


def _told(errors: Sequence[TrainerError]) -> int:
    """Print every error; the first one's exit code."""
    from trainer.cli.errors import error_text

    for error in errors:
        click.echo(error_text(error), err=True)
    return errors[0].exit_code


def machine_judged() -> tuple[Facts | None, list[TrainerError], Surroundings]:
    """The machine's facts, None where they cannot be read, with what would stop a run here, and the mounts.

    In one of our images its volumes are judged too.
    """
    from trainer.container.appliance import VOLUMES

    volumes = VOLUMES if IMAGE.is_dir() else ()
    folders = [
        _folder(Path(volume.path), volume.meaning, is_result=volume.path == OUTPUT)
        for volume in volumes
        if volume.access == "rw"
    ]
    surroundings = _surroundings(folders, _named((), None), on_machine=True)
    facts, errors = _judged(surroundings, on_machine=True)
    return facts, errors, surroundings


def _loaded(name: str, words: Sequence[str]) -> Loaded | None:
    """The configuration that the command will load; None where it names none. Raises as `load_config`."""
    from trainer.cli.commands import trainer
    from trainer.cli.options import load_config
    from trainer.planning.kept_decisions import continued

    with click.Context(trainer) as context:
        command = trainer.get_command(context, name)
        assert command is not None
        # as far as the words can be understood: what is wrong with them the command itself says
        given = command.make_context(name, list(words), parent=context, resilient_parsing=True).params
    if not given["configs"]:
        return None
    loaded = load_config(
        given["configs"],
        given["overrides"] or (),
        given["dataset"],
        given["output"],
        given["presets"] or (),
        given.get("budget"),
    )
    return continued(loaded) if name == "train" else loaded


def _folders(name: str, loaded: Loaded | None) -> Iterator[Folder]:
    """What the command writes to."""
    from trainer import families
    from trainer.config import environment
    from trainer.modeling.base.base import can_download, find_base

    if loaded is None:
        return
    config = loaded.config
    if name == "train":
        yield _folder(config.output_dir, "the run's folder", is_result=True)
    if name in ("train", "cache"):
        yield _folder(environment.cache_dir(config), "the folder of encoded samples")
    family = families.get(config.family)
    base = find_base(config, families.components(family), trained=family.trained_component)
    if base.state != "complete" and can_download(config):
        yield _folder(environment.hub_cache_dir(), "the folder of base models")


def _folder(path: Path, meaning: str, *, is_result: bool = False) -> Folder:
    from trainer.cli.targets import nearest
    from trainer.container.preflight import Folder

    # a link in the image may lead to a volume
    path = path.expanduser().resolve()
    existing, error = nearest(path)
    return Folder(
        path=str(path),
        meaning=meaning,
        existing=str(existing),
        owner=existing.stat().st_uid,
        error=error,
        is_result=is_result,
    )


def _surroundings(folders: Iterable[Folder], named: str, *, on_machine: bool) -> Surroundings:
    from trainer.container.preflight import Surroundings
    from trainer.machine.mounts import parse_mounts

    return Surroundings(
        user=os.getuid(),
        group=os.getgid(),
        mounts=parse_mounts(MOUNTINFO.read_text()),
        folders=tuple(folders),
        cudnn=_foreign_cudnn() if on_machine else (),
        named=named,
    )


def _named(words: Sequence[str], loaded: Loaded | None) -> str:
    """Every path that the user wrote: a mount there is where it belongs."""
    from trainer.config import environment
    from trainer.config.reading.load import dump

    values = (environment.read(variable.name) or "" for variable in environment.VARIABLES)
    return "\n".join([*words, *values, dump(loaded.config) if loaded else ""])


def _foreign_cudnn() -> tuple[str, ...]:
    """Files of cuDNN in the folders of LD_LIBRARY_PATH, other than those beside torch."""
    from trainer.config import environment
    from trainer.machine.torch_build import torch_folder

    torch = torch_folder()
    places = (environment.read("LD_LIBRARY_PATH") or "").split(":")
    folders = (Path(place).resolve() for place in places if place)
    foreign = (one for one in folders if torch is None or not one.is_relative_to(torch.parent))
    return tuple(str(file) for folder in foreign for file in sorted(folder.glob("libcudnn*.so*")))


def toolkit() -> str:
    """The CUDA toolkit that is installed, in words."""
    from trainer.config import environment

    folder = Path(environment.read("CUDA_HOME") or "/usr/local/cuda")
    if not (folder / "bin/nvcc").exists():
        return "none, and none is needed"
    found = re.search(r"cuda-([0-9.]+)$", str(folder.resolve()))
    version = f"CUDA {found[1]}" if found else "a CUDA whose version its folder does not tell"
    return f"{version} in {folder}, which training does not use"
