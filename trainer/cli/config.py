"""`trainer config`: resolved configurations, their mistakes, their variables and their JSON schema."""

from __future__ import annotations

import click

from trainer.cli.options import Layers, config_arguments
from trainer.cli.output import say, shown_below_options
from trainer.container.appliance import IMAGE_ENVIRONMENT, SECRETS
from trainer.errors import one_line
from trainer.words.plurals import numbered


@shown_below_options
@click.group()
def config() -> None:
    """Show, check or document configurations.
    \f
    Layers, low to high: schema, family, files from left to right, --preset,
    TRAINER__SECTION__KEY, --set, --dataset, --output, --budget and --gpus.

    Examples:
      trainer config check train_configs/flux1_dev_lora.yaml
      TRAINER__TRAIN__SEED=7 trainer config show train_configs/flux1_dev_lora.yaml --set lora.rank=32
    """


@shown_below_options
@config.command()
@click.option("--markdown", is_flag=True, help="Without values, and with what the images set.")
def variables(markdown: bool) -> None:
    """List the environment variables that matter to a run.
    \f
    Examples:
      trainer config variables              # with their values here
      trainer config variables --markdown   # the table of DOCKER.md
    """
    from trainer.config import environment

    if markdown:
        click.echo(variables_markdown(), nl=False)
        return
    for variable in environment.VARIABLES:
        value = environment.read(variable.name)
        shown = "unset" if value is None else "set" if variable.name in SECRETS else f"= {value}"
        default = f" (unset: {variable.default})" if variable.default else ""
        say(f"{variable.name}  {shown}\n    {variable.meaning}{default}")


def variables_markdown() -> str:
    """The table of variables as Markdown, one row each, and the one for keys of the configuration."""
    from trainer.config.environment import CONFIG_PREFIX, VARIABLES
    from trainer.words.tables import markdown

    images = {"TRAINER_PROFILE": "the image's own", **IMAGE_ENVIRONMENT}
    rows = [
        (f"`{one.name}`", _code(one.default), _code(images.get(one.name, "")), one.meaning)
        for one in VARIABLES
    ]
    keys = f"any key of the configuration: `{CONFIG_PREFIX}TRAIN__SEED=7` is `train.seed: 7`"
    rows.append((f"`{CONFIG_PREFIX}SECTION__KEY`", "", "", keys))
    return markdown(("variable", "unset means", "in the images", "meaning"), rows)


def _code(text: str) -> str:
    """A value as code; words stay words."""
    return f"`{text}`" if text and " " not in text else text


@shown_below_options
@config.command()
@config_arguments
def show(layers: Layers) -> None:
    """Print the merged configuration, with the source of each value behind it.
    \f
    Examples:
      trainer config show train_configs/flux1_dev_lora.yaml
      trainer config show base.yaml mine.yaml --set train.max_train_steps=500 --dataset /data
      trainer config show base.yaml mine.yaml > merged.yaml   # loads to the same configuration
    """
    from trainer.config.secrets import redacted
    from trainer.config.writing.dump import dump

    loaded = layers.load()
    click.echo(redacted(dump(loaded.config, loaded.sources)), nl=False)


@shown_below_options
@config.command()
@config_arguments
def check(layers: Layers) -> None:
    """Check the files as one configuration; all mistakes are listed at once. Loads no image and no model.
    \f
    Examples:
      trainer config check train_configs/flux1_dev_lora.yaml
      trainer config check base.yaml mine.yaml --output /output/mine
    """
    loaded = layers.load()
    for path in layers.configs:
        count = sum(source.rpartition(":")[0] == str(path) for source in loaded.sources.values())
        say(f"ok: {one_line(path)}: {numbered(count, 'value')} in effect")
    run = loaded.config
    chats = any(one.has_conversations for one in run.data.sets)
    size = f"rows of {run.data.max_sequence_length} tokens" if chats else f"{run.data.resolution} px"
    epochs, steps = run.train.num_train_epochs, run.train.max_train_steps
    length = numbered(steps, "step") if epochs is None else numbered(epochs, "epoch")
    what = f"{run.family}, {run.method}, {length}, {size}"
    say(f"ok: {what} -> {run.output_dir}")


@shown_below_options
@config.command()
def schema() -> None:
    """Print the JSON schema of configuration files; editors complete and check with it.
    \f
    Examples:
      trainer config schema > train_configs/schema.json
    """
    import json

    from trainer import families
    from trainer.config.writing.schema_json import json_schema

    click.echo(json.dumps(json_schema(families.names()), indent=2))


@shown_below_options
@config.command()
@click.argument("family")
def template(family: str) -> None:
    """Print a configuration of every key with its help, and with the family's values.
    \f
    Examples:
      trainer families                         # lists the names
      trainer config template FAMILY > my.yaml
    """
    from trainer import families
    from trainer.config.writing import template as text
    from trainer.errors import ConfigError
    from trainer.words.near import did_you_mean

    if family not in families.names():
        remedy = f"{did_you_mean(family, families.names())}known: {', '.join(families.names())}"
        raise ConfigError(f'unknown family "{family}"', where="FAMILY", remedy=remedy)
    one = families.get(family)
    conversations = one.sample_kind == "conversation"
    click.echo(text.template(family, one.defaults, conversations=conversations), nl=False)
