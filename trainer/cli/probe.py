"""`trainer probe`: a description of this machine, and the speed of the kernels that work on it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from trainer.cli.options import GivenPath, Layers, layer_options
from trainer.cli.output import shown_below_options

if TYPE_CHECKING:
    from trainer.machine.facts import Facts, KernelVerdict

_COLUMNS = ("kernel", "verdict", "ms", "relative error", "at", "reason")
_NUMBERS = (2, 3)
_NEXT = """
How to go on:
  trainer plan CONFIG       what a run will do here, and why, before anything is loaded
  trainer probe CONFIG      measure kernels, and how the base model is read, at the run's shape
  trainer families          the models that can be trained"""
_IN_IMAGE = """
To train, give the container your images and a place for the results:
  mkdir -p data models cache output
  docker run --rm{gpus} --user "$(id -u):0" -v "$PWD/data":/data:ro \\
    -v "$PWD/models":/models -v "$PWD/cache":/cache -v "$PWD/output":/output \\
    IMAGE train {prefix}/train_configs/flux1_dev_lora.yaml --dataset /data --output /output/my-lora
`train --help` shows more, `families` lists the models, and any other program runs as it is: IMAGE bash"""


@shown_below_options
@click.command()
@click.argument("configs", metavar="[CONFIG]...", nargs=-1, type=GivenPath())
@layer_options
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def probe(layers: Layers, as_json: bool) -> int:
    """Say what this machine is and can do, and what would stop a run on it.

    With a configuration every kernel is measured forward and backward at the run's shape, and how fast the
    base model's files are read by our own reader and by fastsafetensors. All of it is measured anew, what
    worked too, and takes the place of what was kept: do it while nothing else uses the GPU.
    \f
    Examples:
      trainer probe                                    # what this machine is and can do
      trainer probe train_configs/flux1_dev_lora.yaml  # and what is measured at the run's shape
      trainer probe --json > my-machine.json           # facts for `trainer plan --facts`
    """
    with_config = layers.given()
    if not as_json:
        return _screen(layers)
    from trainer.cli.measure import measured_anew
    from trainer.files import codec
    from trainer.planning.planning import machine_facts

    facts = machine_facts()
    if with_config:
        facts = measured_anew(layers.load(), facts)
    click.echo(codec.to_json(facts.idle()))  # what others use now is no property of the machine
    return 0


def describe(facts: Facts, requested: str = "auto", toolkit: str = "none") -> list[str]:
    """The facts as lines for people, then the verdicts as a table, fastest first, and loaders' rates."""
    from trainer.container.describe import machine_rows, text
    from trainer.words.tables import aligned

    def order(verdict: KernelVerdict) -> tuple[str, str, float]:
        speed = math.inf if verdict.milliseconds is None else verdict.milliseconds
        return verdict.kernel.partition(".")[0], verdict.shape_class, speed

    lines = text(machine_rows(facts, requested, toolkit))
    if facts.verdicts:
        rows = [_COLUMNS, *(_row(one) for one in sorted(facts.verdicts, key=order))]
        lines += ["", *aligned(rows, right=_NUMBERS)]
    rates: dict[tuple[str, str], list[str]] = {}
    for row in facts.readings:
        rates.setdefault((row.disk, row.state), []).append(f"{row.loader} {row.gib_per_second:.2f} GiB/s")
    blank = [""] if rates else []
    return lines + blank + [f"reading from {', '.join(at)}: {', '.join(of)}" for at, of in rates.items()]


def _screen(layers: Layers) -> int:
    """Print the machine, its abilities, the errors that would stop a run on it, and how to go on."""
    from trainer.cli import surroundings
    from trainer.cli.errors import error_text
    from trainer.cli.measure import measured_anew
    from trainer.container.describe import text, volume_rows
    from trainer.machine.host import WSL_SPILLS
    from trainer.planning.planning import requested_profile

    facts, errors, given = surroundings.machine_judged()
    if facts is not None:
        if layers.configs:
            facts = measured_anew(layers.load(), facts)
        for line in describe(facts, requested_profile(), surroundings.toolkit()):
            click.echo(line)
    in_image = surroundings.IMAGE.is_dir()
    if in_image:
        click.echo("\n".join(("", *text(volume_rows(given.mounts)))))
    for error in errors:
        click.echo(f"\na run would stop here:\n{error_text(error)}")
    if facts is not None and facts.wsl and facts.gpus:
        click.echo(f"\nwarning: {WSL_SPILLS}")
    gpus = "" if requested_profile() == "cpu" else " --gpus all"
    click.echo(_IN_IMAGE.format(prefix=surroundings.IMAGE, gpus=gpus) if in_image else _NEXT)
    return 0 if facts is not None else errors[0].exit_code


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
