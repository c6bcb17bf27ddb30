"""The command line. A command imports its work inside its body, so that `--help` stays cheap."""

from __future__ import annotations

import gc
from collections.abc import Sequence

_OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Imports leave objects that stay: to look through them at every 700 takes a twentieth of a short command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `trainer` with `arguments` (the process's own if not given) and return the exit code."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    from trainer.cli.commands import trainer
    from trainer.cli.errors import run
    from trainer.config.environment import without_plugins
    from trainer.config.interpreter import require_utf8
    from trainer.telemetry.streams import outlive_readers

    if arguments is None:
        require_utf8()
    without_plugins()
    outlive_readers(stdout=False)
    code = run(trainer, arguments)
    if arguments is None:  # the process ends: else the interpreter would look through all objects again
        gc.freeze()
    return code
