"""What commands say to people; what programs read of them is written by `click.echo`."""

from __future__ import annotations

import click

from trainer.config.secrets import shown


def say(text: str, *, err: bool = False) -> None:
    """Print a text without secrets and with control characters spelled out, on stderr with `err`."""
    click.echo(shown(text), err=err)
