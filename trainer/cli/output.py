"""Texts of commands for people; what programs read of them is written by `click.echo`."""

from __future__ import annotations

import inspect
from typing import TypeVar

import click

from trainer.config.secrets import shown

C = TypeVar("C", bound=click.Command)


def say(text: str, *, err: bool = False) -> None:
    """Print a text without secrets and with control characters spelled out, on stderr with `err`."""
    click.echo(shown(text), err=err)


def shown_below_options(command: C) -> C:
    """Have `--help` show the docstring's text after a form feed as it is written, below the options."""
    above, _, below = (inspect.getdoc(command.callback) or "").partition("\f")
    command.help = above.strip()
    command.epilog = "\n\n".join(f"\b\n{part}" for part in below.strip().split("\n\n"))
    return command
