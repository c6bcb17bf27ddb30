"""A nursery without torch: it has imported a supervisor, and what children that beat or write metrics use.

Tests that are about the start itself, about what outlives a process, or about how Python ends, start their
processes by Python.
"""

from __future__ import annotations

import gc

from tests.e2e import nursery


def _import_all() -> None:
    import yaml

    import trainer.config.interpreter
    import trainer.telemetry.sinks.metrics
    import trainer.telemetry.supervising.supervisor

    del trainer, yaml
    gc.freeze()


if __name__ == "__main__":
    nursery.main(_import_all)
