"""`trainer preflight`: the check that a container's entrypoint asks for before it starts a command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from trainer.cli.output import say, shown_below_options

if TYPE_CHECKING:
    from trainer.config.reading.load import Loaded

ON_MACHINE = frozenset({"train", "cache", "sample", "verify-lora"})
"""Commands that compute; with a configuration they have a plan, whose environment their children get."""
IN_CONTAINER = ON_MACHINE | {"fetch", "merge"}
"""Commands whose mounts and folders are checked; all others need nothing of their machine."""


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
    if not words or words[0] not in IN_CONTAINER or "--help" in words:
        return 0
    from trainer.cli.errors import error_text
    from trainer.cli.surroundings import command_judged
    from trainer.container.preflight import warnings
    from trainer.planning.planning import plan_run, requested_profile

    loaded = _loaded(words[0], words[1:])
    if loaded is None and words[0] != "verify-lora":
        return 0  # the command itself says how it is called
    on_machine = words[0] in ON_MACHINE and loaded is not None
    facts, errors, surroundings = command_judged(words[0], words, loaded, on_machine=on_machine)
    for error in errors:
        click.echo(error_text(error), err=True)
    if errors:
        return errors[0].exit_code
    for warning in warnings(surroundings):
        say(f"warning: {warning}", err=True)
    if facts is not None and loaded is not None:
        plan_run(loaded, facts, requested_profile())
    return 0


def _loaded(name: str, words: Sequence[str]) -> Loaded | None:
    """The configuration that the command will load; None where it names none. Raises as `Layers.load`."""
    from trainer.cli.commands import trainer
    from trainer.cli.options import layers_of
    from trainer.planning.kept_decisions import continued

    with click.Context(trainer) as context:
        command = trainer.get_command(context, name)
        assert command is not None
        # as far as the words can be understood: what is wrong with them the command itself says
        given = command.make_context(name, list(words), parent=context, resilient_parsing=True).params
    if not given["configs"]:
        return None
    loaded = layers_of(given).load()
    return continued(loaded) if name == "train" else loaded
