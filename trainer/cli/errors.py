"""The end of a command: errors with an exit code become text, others are bugs and keep a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import click

from trainer.cli.output import print_error, say
from trainer.config.secrets import shown
from trainer.errors import MEANING, ConfigError, ExitCode, TrainerError, starts_told
from trainer.telemetry.streams import ReaderGone

_FILE_OPTIONS = frozenset({"config", "config_file", "config-file", "cfg"})
"""Options by which other trainers take a configuration file."""
PRINT_JSON = ("plan", "probe", "doctor", "score")
"""Commands that have a `--json` of their own, by which they print their result."""
_INTERRUPTED = 128 + 2  # as a shell reports SIGINT
_BROKEN_PIPE = 128 + 13  # as a shell reports SIGPIPE


def run(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a click command and return the exit code.

    A command ends with 0, or with the number that it returns or hands to `Context.exit`. A command line that
    cannot be understood is a bad configuration (78): a Job that tries it again would only fail again.
    An error is printed on stdout as well, as one JSON object, where the command line asks for JSON.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with starts_told():
            result = command.main(words, prog_name="trainer", standalone_mode=False)
        sys.stdout.flush()
    except TrainerError as error:
        return _told(error_text(error), error, words)
    except click.NoSuchOption as error:
        unknown = _unknown_option(error)
        return _told(error_text(unknown), unknown, words)
    except click.ClickException as error:
        usage = io.StringIO()
        error.show(usage)
        return _told(shown(usage.getvalue()).removesuffix("\n"), _misused(error), words)
    except click.Abort:
        say("interrupted", err=True)
        return _INTERRUPTED
    except ReaderGone:
        # the reader went away (`| head`): nothing more can be said, not even by the interpreter as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return result if isinstance(result, int) else ExitCode.OK


def _told(text: str, error: TrainerError, words: Sequence[str]) -> ExitCode:
    """Print an error's text on stderr, and the error on stdout where `words` ask for JSON; its exit code."""
    click.echo(text, err=True)
    if asks_for_json(words):
        print_error(error.exit_code, error.problems)
    return error.exit_code


def asks_for_json(words: Sequence[str]) -> bool:
    """True for `trainer --json COMMAND`, and for a command's own `--json` that prints its result so; of
    `trainer preflight -- WORDS` for such WORDS.

    The words are looked at by themselves: they may be what cannot be understood.
    """
    command = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
    if command < len(words) and words[command] == "preflight" and "--json" not in words[:command]:
        return asks_for_json([word for word in words[command + 1 :] if word != "--"])
    own = command < len(words) and words[command] in PRINT_JSON
    return "--json" in (words if own else words[:command])


def _misused(error: click.ClickException) -> ConfigError:
    """The error for a command line that click does not understand."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    where = "trainer" if context is None else context.command_path
    return ConfigError(error.format_message(), where=where, remedy=f"{where} --help shows how it is used")


def _unknown_option(error: click.NoSuchOption) -> ConfigError:
    """The error for an unknown option, with its name here if another trainer or our files have it."""
    from trainer.config import fields

    command = "trainer" if error.ctx is None else error.ctx.command_path
    takes_keys = error.ctx is not None and any(one.name == "overrides" for one in error.ctx.command.params)
    word = error.option_name.lstrip("-")
    if takes_keys and word in _FILE_OPTIONS:
        remedy = f"name the file without an option: {command} my.yaml"
    elif takes_keys and (meant := fields.option_meant(word)):
        remedy = meant
    elif error.possibilities:
        remedy = f"did you mean {' or '.join(error.possibilities)}?"
    else:
        remedy = f"{command} --help lists the options"
    return ConfigError(f"{command} has no such option", where=error.option_name, remedy=remedy)


def error_text(error: TrainerError) -> str:
    """The text of an error: each problem with its place, and the remedy below it."""
    count = len(error.problems)
    title = MEANING[error.exit_code] if count == 1 else f"{MEANING[error.exit_code]}, {count} problems"
    text = "\n".join([f"error: {title} (exit code {error.exit_code.value})", *map(str, error.problems)])
    return shown(text)
