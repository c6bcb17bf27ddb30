"""The command line. A command imports its work inside its body, so that `--help` stays cheap."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `trainer` with `arguments` (the process's own if not given) and return the exit code."""
    from trainer.cli.commands import trainer
    from trainer.cli.errors import run
    from trainer.telemetry.streams import outlive_readers

    outlive_readers(stdout=False)
    return run(trainer, arguments)
