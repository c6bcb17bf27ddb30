"""`trainer families`: the models that can be trained, and their licences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from trainer.cli.output import say, shown_below_options
from trainer.ways.storages import WAYS, Way
from trainer.words import extras
from trainer.words.sizes import GIB
from trainer.words.tables import markdown

if TYPE_CHECKING:
    from trainer.families.family import Family


@shown_below_options
@click.command()
@click.option("--markdown", "as_markdown", is_flag=True, help="The table of docs/families.md.")
def families(as_markdown: bool) -> None:
    """List the model families, with their licences and presets of `lora.target_modules`.
    \f
    Examples:
      trainer families
      trainer families --markdown > docs/families.md
    """
    from trainer.families import get, names

    if as_markdown:
        click.echo(_markdown([get(name) for name in names()]), nl=False)
        return
    for name in names():
        family = get(name)
        say(f"{name}: {family.title}")
        say(f"  licence of the base model: {family.licence}")
        say(f"  trains on: {_samples(family)}")
        say(f"  full fine-tune in bf16: {_full(family)}")
        say(f"  lora.target_modules: {', '.join(family.lora_targets)}")


def _markdown(families: list[Family]) -> str:
    """docs/families.md: one row a family."""
    columns = {
        "family": lambda one: f"`{one.name}`",
        "base model": lambda one: one.defaults["model"]["pretrained_model_name_or_path"],
        "its licence": lambda one: one.licence,
        "trained part": lambda one: f"{_parameters(one) / 1e9:.1f} B parameters",
        "trains on": _samples,
        "text tokens, at most": lambda one: f"{one.max_sequence_length:,}",
        "`lora.target_modules`": lambda one: ", ".join(f"`{preset}`" for preset in one.lora_targets),
        "full fine-tune in bf16": _full,
        "LoRA file": lambda one: "diffusers" if one.sample_kind == "image" else "PEFT",
        "ComfyUI": lambda one: f"yes: {one.comfyui}" if one.comfyui else "no",
    }
    rows = ([cell(one) for cell in columns.values()] for one in families)
    return _HEAD + markdown([*columns], rows) + _FOOT


def _quantised() -> str:
    """The storages of a frozen base, with the packages that they need, as a choice."""
    ways = {way.weights: way for way in WAYS.values() if not way.trains}
    *others, last = (_storage(way) for way in ways.values())
    return f"{', '.join(others)} or {last}"


def _storage(way: Way) -> str:
    installed = f", `{extras.command(way.extra)}`" if way.extra else ""
    return f"{way.weights} ({way.package}{installed})" if way.package else way.weights


_HEAD = f"""# Model families

Written by `make docs` from the families themselves. Every family trains by `method: lora` and `method: full`;
a LoRA also trains over a base in {_quantised()},
and over a base that is stored in nf4 already. "At least" is the weights, gradients and optimizer state alone,
without activations; recorded machines are those of tests/golden/machines, the largest an H200 of 140 GiB.

"""
_FOOT = """
ComfyUI: where its own source maps the names of the file's layers. ComfyUI 0.33.0, run on a CPU with tiny
models of the six families, took every key of LoRA and LoKr files and changed weights by alpha / rank times
their product. How to add a family: [adding-a-family.md](adding-a-family.md).
"""


def _samples(family: Family) -> str:
    """The content of a data set for this family."""
    least, most = family.control_counts
    if most == 0:
        return "conversations" if family.sample_kind == "conversation" else "images with captions"
    count = str(least) if least == most else f"{least} to {most}"
    return f"images with captions and {count} control image{'s' if most > 1 else ''} each"


def _parameters(family: Family) -> int:
    """Size of the component that trains, from the committed table of the full-size model."""
    from trainer.planning.shapes.geometry import TABLES, read_table

    shapes = read_table(TABLES / f"{family.name}.json")[family.trained_component]
    return sum(math.prod(shape) for shape in shapes.values())


_LARGEST_GIB = 129
"""Device memory that a plan fills at most on the largest recorded machine, an H200."""


def _full(family: Family) -> str:
    """Memory that a full fine-tune keeps, and whether a recorded machine has so much on one GPU."""
    from trainer.planning.cost import states

    weights, gradients, optimizer, *_ = states.of("full", "bf16", "adamw")
    needed = _parameters(family) * (weights + gradients + optimizer) / GIB
    nowhere = ", which no recorded machine has on one GPU" if needed > _LARGEST_GIB else ""
    return f"{needed:.0f} GiB at least{nowhere}"
