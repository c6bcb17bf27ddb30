"""Floor 7: `trainer families`: what can be trained, and under which licence."""

from __future__ import annotations

import click


@click.command(
    epilog="""\b
Examples:
  trainer families
"""
)
def families() -> None:
    """List the model families, with their licences and presets of `lora.target_modules`."""
    from trainer.families import get, names

    for name in names():
        family = get(name)
        click.echo(f"{name}: {family.title}")
        click.echo(f"  licence of the base model: {family.licence}")
        click.echo(f"  lora.target_modules: {', '.join(family.lora_targets)}")
