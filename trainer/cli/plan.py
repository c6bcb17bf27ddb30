"""`trainer plan`: the decisions of a run on a machine and their reasons, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import click

from trainer.cli.options import GivenPath, Layers, config_arguments_and_machine
from trainer.cli.output import say, shown_below_options


@shown_below_options
@click.command()
@config_arguments_and_machine
@click.option(
    "--facts",
    "facts_file",
    metavar="FILE",
    type=GivenPath(),
    help="Plan for a recorded machine instead of this one.",
)
@click.option("--json", "form", flag_value="json", help="Print plan.json instead of the table.")
@click.option(
    "--export", "form", flag_value="export", help="Print the environment of the training process for a shell."
)
def plan(layers: Layers, facts_file: Path | None, form: str | None) -> None:
    """Show every hardware decision with its source and reason, and the memory that the run will need.
    \f
    TRAINER_PROFILE names a hardware profile (auto, dgx-spark, rtx-4090, hopper-fp8, generic-cuda, cpu).
    What you write in the configuration is honoured or refused; only `auto` is decided here.

    Examples:
      trainer plan train_configs/flux1_dev_lora.yaml
      trainer plan train_configs/flux1_dev_lora.yaml --facts tests/golden/machines/dgx-spark.json
      trainer plan train_configs/flux1_dev_lora.yaml --budget 20GiB
      trainer plan train_configs/flux1_dev_lora.yaml --set features.weights=int8 --json > plan.json
      trainer plan train_configs/flux1_dev_lora.yaml --export > plan.env && . ./plan.env
    """
    from trainer.cli.places import Place
    from trainer.config import environment, hosts
    from trainer.config.launchers import Launch
    from trainer.config.secrets import redacted
    from trainer.config.tree import placing
    from trainer.files import codec
    from trainer.planning.data_rows import require_dataset, whole_plan
    from trainer.planning.planning import machine_facts, requested_profile
    from trainer.planning.render import environment_exports, plan_text

    require_dataset(layers.dataset)
    place = Place(launch=Launch(), hosts=hosts.found(environment.snapshot()))
    loaded = place.reconciled(layers.load())
    with placing(loaded.sources):
        _, decided = whole_plan(loaded, machine_facts(facts_file), requested_profile())
    if form == "json":
        click.echo(redacted(codec.to_json(decided)), nl=False)
    elif form == "export":
        click.echo(environment_exports(decided), nl=False)
    else:
        say(plan_text(decided))
