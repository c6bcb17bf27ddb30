"""Floor 7: `trainer config`: what a configuration resolves to, whether it is right, and its JSON schema."""

from __future__ import annotations

from pathlib import Path

import click

from trainer.cli.options import config_arguments, load_config


@click.group(
    epilog="""\b
Layers, low to high: schema, family, files from left to right,
TRAINER__SECTION__KEY, --set, --dataset and --output.

\b
Examples:
  trainer config check train_configs/flux1_dev_lora.yaml
  TRAINER__TRAIN__SEED=7 trainer config show train_configs/flux1_dev_lora.yaml --set lora.rank=32
"""
)
def config() -> None:
    """Show, check or document configurations."""


@config.command(
    epilog="""\b
Examples:
  trainer config show train_configs/flux1_dev_lora.yaml
  trainer config show base.yaml mine.yaml --set train.max_train_steps=500 --dataset /data
  trainer config show base.yaml mine.yaml > merged.yaml   # loads to the same configuration
"""
)
@config_arguments
def show(
    configs: tuple[Path, ...], overrides: tuple[str, ...], dataset: Path | None, output: Path | None
) -> None:
    """Print the merged configuration, with the source of each value behind it."""
    from trainer.config.load import dump_with_sources

    loaded = load_config(configs, overrides, dataset, output)
    click.echo(dump_with_sources(loaded.config, loaded.sources), nl=False)


@config.command(
    epilog="""\b
Examples:
  trainer config check train_configs/flux1_dev_lora.yaml
  trainer config check base.yaml mine.yaml --output /output/mine
"""
)
@config_arguments
def check(
    configs: tuple[Path, ...], overrides: tuple[str, ...], dataset: Path | None, output: Path | None
) -> None:
    """Check the files as one configuration; all mistakes are listed at once. Loads no image and no model."""
    loaded = load_config(configs, overrides, dataset, output)
    for path in configs:
        count = sum(source.rpartition(":")[0] == str(path) for source in loaded.sources.values())
        click.echo(f"ok: {path}: {count} {'value' if count == 1 else 'values'} in effect")
    run = loaded.config
    what = f"{run.family}, {run.method}, {run.train.max_train_steps} steps, {run.data.resolution} px"
    click.echo(f"ok: {what} -> {run.output_dir}")


@config.command(
    epilog="""\b
Examples:
  trainer config schema > train_configs/schema.json
"""
)
def schema() -> None:
    """Print the JSON schema of configuration files; editors complete and check with it."""
    import json

    from trainer import families
    from trainer.config.schema_json import json_schema

    click.echo(json.dumps(json_schema(families.names()), indent=2))
