"""Floor 7: `trainer probe`: what this machine is and which kernels work on it, how fast."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from trainer.cli.options import GivenPath, layer_options, load_config

_NUMBERS = (2, 3)


@click.command(
    epilog="""\b
Examples:
  trainer probe                                    # facts about this machine
  trainer probe train_configs/flux1_dev_lora.yaml  # and the kernels, measured at the run's shape
  trainer probe --json > my-machine.json           # facts for `trainer plan --facts`
"""
)
@click.argument("configs", metavar="[CONFIG]...", nargs=-1, type=GivenPath())
@layer_options
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def probe(
    configs: tuple[Path, ...],
    presets: tuple[str, ...],
    overrides: tuple[str, ...],
    dataset: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Measure this machine: facts, and with a configuration every kernel forward and backward.

    Kernels are measured anew, those that worked too, and take the place of what was kept: do it while nothing
    else uses the GPU.
    """
    from trainer.cli.measure import measured_anew
    from trainer.engine.planning import machine_facts
    from trainer.hardware.facts import facts_to_json
    from trainer.hardware.host import WSL_SPILLS

    facts = machine_facts()
    if configs:
        loaded = load_config(configs, overrides, dataset, output, presets)
        facts = measured_anew(loaded, facts)
    if as_json:
        click.echo(facts_to_json(facts))
        return 0
    for line in describe(facts_to_json(facts)):
        click.echo(line)
    if facts.wsl and facts.gpus:
        click.echo(f"warning: {WSL_SPILLS}", err=True)
    return 0


def describe(text: str) -> list[str]:
    """The facts as lines of `name: value` for people, then the verdicts as a table, fastest first."""
    import json

    facts = json.loads(text)
    verdicts = facts.pop("verdicts", [])
    lines = [f"{name}: {json.dumps(value)}" for name, value in facts.items()]
    return [*lines, "", *_table(verdicts)] if verdicts else lines


def _table(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Aligned columns, numbers to the right; verdicts of one shape stay together."""
    order = sorted(verdicts, key=_order)
    rows = [("kernel", "verdict", "ms", "relative error", "at", "reason"), *(_row(one) for one in order)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _order(verdict: Mapping[str, Any]) -> tuple[str, str, float]:
    kind, speed = verdict["kernel"].partition(".")[0], verdict["milliseconds"]
    return kind, verdict["shape_class"], math.inf if speed is None else speed


def _row(verdict: Mapping[str, Any]) -> tuple[str, ...]:
    speed, error = verdict["milliseconds"], verdict["relative_error"]
    return (
        verdict["kernel"],
        "works" if verdict["works"] else "FAILS",
        "-" if speed is None else f"{speed:.3f}",
        "-" if error is None else f"{error:.1e}",
        verdict["shape_class"],
        verdict["reason"],
    )
