"""`trainer preflight`: the check that a container's entrypoint asks for before it starts a command."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.cli.health import NO_RUN
from trainer.cli.output import print_error, say, shown_below_options

if TYPE_CHECKING:
    from trainer.cli.places import Place
    from trainer.config.reading.load import Loaded
    from trainer.errors import TrainerError

ON_MACHINE = frozenset({"train", "cache", "sample", "verify-lora"})
"""Commands that compute; with a configuration they have a plan, whose environment their children get."""
IN_CONTAINER = ON_MACHINE | {"fetch", "merge"}
"""Commands whose mounts and folders are checked; others need nothing of their machine but `_own_folder`."""

ALONE = frozenset({"sample", "verify-lora"})
"""Commands that compute on one GPU, whatever the configuration says of several."""
TOGETHER = frozenset({"train", "cache"})
"""Commands that several hosts do together."""


@shown_below_options
@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def preflight(words: tuple[str, ...]) -> int:
    """Check the machine, the mounts and the plan for the command WORDS, before anything is started.
    \f
    Problems go to stderr, with the exit code that they have everywhere.

    Examples:
      trainer preflight train my.yaml --output /output/my-lora
      trainer preflight -- "$@" && exec trainer "$@"
    """
    from trainer.cli.other_hosts import tell_end, telling

    given = words
    while words[:1] == ("--json",):  # an option of `trainer` itself, before its command
        words = words[1:]
    place = _place(words)
    with telling(place.hosts):
        errors = _judged(words, place)
    if not errors:
        _expect(words)
        return 0
    from trainer.cli.errors import asks_for_json, error_text

    for error in errors:
        click.echo(error_text(error), err=True)
    if asks_for_json(given):
        print_error(errors[0].exit_code, [problem for error in errors for problem in error.problems])
    tell_end(place.hosts, errors[0].exit_code, errors[0].problems[0].what)
    return errors[0].exit_code


def _expect(words: Sequence[str]) -> None:
    """Leave word for `trainer health` that this container has no run, so that nobody waits for a heartbeat
    of a download, of the studio or of a picture, which has a runtime folder of its own; or take it back.
    """
    from trainer.config import environment

    mark = environment.runtime_dir() / NO_RUN
    with contextlib.suppress(OSError):  # whoever needs the folder says what is wrong with it
        if words and words[0] not in TOGETHER:
            mark.touch()
        else:
            mark.unlink(missing_ok=True)


def _place(words: Sequence[str]) -> Place:
    """The place of the command, where it is one that several hosts do together. Raises ConfigError."""
    from trainer.cli.places import Place
    from trainer.config import environment, hosts, launchers

    if not words or words[0] not in TOGETHER or "--help" in words:
        return Place(launch=launchers.Launch(), hosts=hosts.ONE)
    environ = environment.snapshot()
    launch = launchers.found(environ)
    return Place(launch=launch, hosts=hosts.found(environ, launched=bool(launch.source)))


def _judged(words: Sequence[str], place: Place) -> Sequence[TrainerError]:
    """Errors of the machine, the mounts and the folders; warnings are printed. Raises those of the plan."""
    own = None if "--help" in words else _own_folder(words)
    if own is None and (not words or words[0] not in IN_CONTAINER or "--help" in words):
        return ()
    from trainer.cli.surroundings import command_judged, folder_judged
    from trainer.container.preflight import warnings
    from trainer.planning.planning import plan_run, requested_profile

    loaded = None
    if own is not None:
        facts, errors, surroundings = folder_judged(words, own, f"the folder of `trainer {words[0]}`")
    else:
        loaded = _loaded(words[0], words[1:])
        if loaded is None and words[0] != "verify-lora":
            return ()  # the command itself says how it is called
        loaded = None if loaded is None else place.reconciled(loaded)
        on_machine = words[0] in ON_MACHINE and loaded is not None
        facts, errors, surroundings = command_judged(words[0], words, loaded, on_machine=on_machine)
    if errors:
        return errors
    for warning in warnings(surroundings):
        say(f"warning: {warning}", err=True)
    if facts is not None and loaded is not None:
        plan_run(loaded, facts, requested_profile())
    return ()


def _own_folder(words: Sequence[str]) -> Path | None:
    """The folder in which a service keeps its state; None for other commands."""
    if tuple(words[:2]) == ("queue", "run"):
        from trainer.config import environment

        return environment.queue_dir()
    if tuple(words[:1]) == ("ui",):
        from trainer.cli.ui import STATE_FOLDER

        given = _given("ui", words[1:])
        runs = None if given["runs"] is None else given["runs"] / STATE_FOLDER
        found: Path | None = given["folder"] or runs  # neither where the command refuses its words
        return found
    return None


def _given(name: str, words: Sequence[str]) -> dict[str, Any]:
    """The parameters of a command, as far as its words can be understood: the rest it says itself."""
    from trainer.cli.commands import trainer

    with click.Context(trainer) as context:
        command = trainer.get_command(context, name)
        assert command is not None
        return command.make_context(name, list(words), parent=context, resilient_parsing=True).params


def _loaded(name: str, words: Sequence[str]) -> Loaded | None:
    """The configuration that the command will load; None where it names none. Raises as `Layers.load`."""
    from trainer.cli.options import layers_of
    from trainer.cli.sample import for_one_process
    from trainer.planning.kept_decisions import continued

    given = _given(name, words)
    if not given["configs"]:
        return None
    # a try is drawn by what its run has kept
    loaded = layers_of(given).load(variables=given.get("folder") is None)
    if name in ALONE:
        return for_one_process(loaded)
    return continued(loaded) if name == "train" else loaded
