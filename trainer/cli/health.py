"""`trainer health`, the probe of containers. It must start fast and touch no accelerator."""

from __future__ import annotations

from pathlib import Path

import click

from trainer.cli.options import GivenPath
from trainer.cli.output import say, shown_below_options

NO_RUN = "no-run"
"""File in the runtime folder where a container's command is no run: it writes no status."""


@shown_below_options
@click.command()
@click.option(
    "--runtime-dir",
    type=GivenPath(file_okay=False),
    help="Folder with the run's status.json.  [default: TRAINER_RUNTIME_DIR]",
)
@click.pass_context
def health(context: click.Context, runtime_dir: Path | None) -> None:
    """Say whether the run is alive: exit code 0 when it is healthy, 1 when not, with the reason.
    \f
    Examples:
      trainer health                          # the run of this container or user
      trainer health --runtime-dir /run/lora  # a run that was given its own runtime folder
    """
    import time

    from trainer.config import environment
    from trainer.telemetry.status import KILLED, read_ranks, verdict_of_ranks, was_killed

    directory = environment.runtime_dir() if runtime_dir is None else runtime_dir
    ranks = read_ranks(directory)
    if ranks[0] is None and (directory / NO_RUN).exists():
        say("healthy: no run: this container does something else")
        return
    killed = ranks[0] is not None and was_killed(directory, ranks[0])
    judged = KILLED if killed else verdict_of_ranks(ranks, time.monotonic())
    say(f"{'healthy' if judged.healthy else 'unhealthy'}: {judged.reason}")
    context.exit(0 if judged.healthy else 1)
