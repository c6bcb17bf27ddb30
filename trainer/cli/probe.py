"""Floor 7: `trainer probe`: what this machine is and which kernels work on it, how fast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import GivenPath, layer_options, load_config
from trainer.cli.output import say

if TYPE_CHECKING:
    from trainer.hardware.facts import Facts, KernelVerdict

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
    for line in describe(facts):
        say(line)
    if facts.wsl and facts.gpus:
        say(f"warning: {WSL_SPILLS}", err=True)
    return 0


def describe(facts: Facts) -> list[str]:
    """The facts as lines for people, then the verdicts as a table, fastest first."""
    lines = [f"{name:<10}{text}" for name, text in _lines(facts)]
    return [*lines, "", *_table(facts.verdicts)] if facts.verdicts else lines


def _lines(facts: Facts) -> Iterator[tuple[str, str]]:
    """Name and text of each fact."""
    from trainer.hardware.facts import driver_text, version_text
    from trainer.hardware.memory import gib

    memory, torch = facts.memory, facts.torch
    limit = memory.cgroup_limit_bytes
    limited = f", this container's limit is {gib(limit)}" if limit is not None else ""
    available = f"{gib(memory.available_bytes)} of {gib(memory.total_bytes)} host memory available{limited}"
    yield "machine", f"{facts.architecture}, {facts.cpu_count} processors, {available}"
    for gpu in facts.gpus:
        own = "shared with the CPU" if gpu.integrated else "of its own"
        capability = f"compute capability {version_text(gpu.capability)}"
        yield "GPU", f"{gpu.name}, {capability}, {gib(gpu.total_memory_bytes)} {own}"
    if not facts.gpus:
        yield "GPU", facts.gpu_problem or "none"
    driver = f"{driver_text(facts.driver)}, runs CUDA {version_text(facts.driver_cuda)} and older"
    yield "driver", driver if facts.driver is not None else "none"
    if torch is None:
        yield "torch", "not installed"
    else:
        build = ", a CPU build" if torch.cuda is None else f" for CUDA {version_text(torch.cuda)}"
        yield "torch", ", ".join((f"{version_text(torch.version)}{build}", *torch.arch_list))
    yield "compiler", "C: there" if facts.c_compiler else "C: none, so blocks and kernels cannot be compiled"
    yield "packages", ", ".join(f"{name} {version}" for name, version in sorted(facts.packages.items()))


def _table(verdicts: Sequence[KernelVerdict]) -> list[str]:
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


def _order(verdict: KernelVerdict) -> tuple[str, str, float]:
    kind, speed = verdict.kernel.partition(".")[0], verdict.milliseconds
    return kind, verdict.shape_class, math.inf if speed is None else speed


def _row(verdict: KernelVerdict) -> tuple[str, ...]:
    speed, error = verdict.milliseconds, verdict.relative_error
    return (
        verdict.kernel,
        "works" if verdict.works else "FAILS",
        "-" if speed is None else f"{speed:.3f}",
        "-" if error is None else f"{error:.1e}",
        verdict.shape_class if verdict.dtype == "bf16" else f"{verdict.shape_class} {verdict.dtype}",
        verdict.reason,
    )
