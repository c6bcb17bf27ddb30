"""Texts of commands for people; what programs read of them is written by `click.echo`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import TypeVar

import click

from trainer.config.secrets import redacted, shown
from trainer.errors import Problem, as_data

C = TypeVar("C", bound=click.Command)


def say(text: str, *, err: bool = False) -> None:
    """Print a text without secrets and with control characters spelled out, on stderr with `err`."""
    click.echo(shown(text), err=err)


def wants_json() -> bool:
    """True where the command line was `trainer --json ...`; only a running command may ask."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().params.get("as_json"))


def print_error(exit_code: int, problems: Sequence[Problem]) -> None:
    """Print an error on stdout for programs: `{"error": ...}`, as `errors.as_data`, on one line."""
    click.echo(redacted(json.dumps({"error": as_data(exit_code, problems)})))


def shown_below_options(command: C) -> C:
    """Have `--help` show the docstring's text after a form feed as it is written, below the options."""
    above, _, below = (inspect.getdoc(command.callback) or "").partition("\f")
    command.help = above.strip()
    command.epilog = "\n\n".join(f"\b\n{part}" for part in below.strip().split("\n\n"))
    return command
