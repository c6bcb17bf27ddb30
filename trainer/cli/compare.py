"""`trainer compare`: real runs of several configurations in turn, and whether they differ."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import GivenPath, Layers, compared_arguments
from trainer.cli.output import say, shown_below_options
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.engine.comparing.variants import Variant

_COUNT, _ANY = click.IntRange(min=1), click.IntRange(min=0)


@shown_below_options
@click.command()
@compared_arguments
@click.option(
    "--vary", metavar="KEY=V1,V2", multiple=True, help="One configuration with each of these values of a key."
)
@click.option("--steps", type=_COUNT, default=30, show_default=True, help="Timed steps of each run.")
@click.option("--warmup", type=_COUNT, default=10, show_default=True, help="Steps before them.")
@click.option("--rounds", type=_ANY, default=2, show_default=True, help="Runs of each variant: A B, B A.")
@click.option(
    "--learn", metavar="N", type=_COUNT, help="Also run N steps of each, and A with another seed: losses."
)
@click.option("--json", "record", metavar="FILE", type=GivenPath(), help="Write the table as a record.")
@click.option("--plot", metavar="FILE.png", type=GivenPath(), help="Draw losses and the times of all steps.")
def compare(
    layers: Layers,
    vary: tuple[str, ...],
    steps: int,
    warmup: int,
    rounds: int,
    learn: int | None,
    record: Path | None,
    plot: Path | None,
) -> int:
    """Run configurations in turn, and say whether one is faster, and with --learn whether it learns as well.
    \f
    Without --vary each CONFIG is a variant; with it they are laid over each other. Each run is a `trainer
    train` with A's seed and cache: the same samples in the same order, no checkpoints, no previews. GPUs must
    be idle, else the other program is named (69). What the plans differ in is said first: a ratio is that of
    all of it. "no difference": 1 lies in the ratio's 95 % interval. docs/compare.md has the rest.

    Examples:
      trainer compare train_configs/llama_full.yaml --vary features.compute=bf16,fp8
      trainer compare a.yaml b.yaml --rounds 4 --plot compare.png --json compare.json
      trainer compare my.yaml --vary lora.rank=16,64 --rounds 0 --learn 300 --output compared

    Ctrl-C ends the run under way and prints what is there (75). A run that fails ends it with its own code;
    one but A that diverges within --learn lets the others run first.
    """
    from trainer.cli.jobs import plain_environment
    from trainer.config import environment, launchers
    from trainer.engine.comparing import differences, report
    from trainer.engine.comparing import rounds as running

    launchers.found(environment.snapshot()).require_one("compare")
    extent = running.Extent(steps=steps, warmup=warmup, rounds=rounds, learn=learn or 0)
    extent.require_timed_steps()
    _require_writable(layers.output, record, plot)
    seeds = any(text.startswith("train.seed=") for text in vary)
    variants = _planned(_variants(layers, vary), own_seed=seeds)
    for line in differences.sentences(variants):
        say(line)
    tell = functools.partial(say, err=True)
    outcome = running.compare(variants, extent, layers.output, plain_environment(), tell)
    if outcome.has_steps:
        for line in report.lines(variants, outcome, extent):
            say(line)
        words = _words(layers, vary)
        report.write_files(variants, outcome, extent, words, record=record, plot=plot)
    else:
        say(report.nothing_trained(outcome, [one for one in (record, plot) if one is not None]), err=True)
    if outcome.error is not None:
        raise outcome.error
    return outcome.code


def _words(layers: Layers, vary: Sequence[str]) -> list[str]:
    """The words of the command that say what was compared, without folders."""
    given = {"--budget": layers.budget, "--gpus": layers.gpus}
    return [
        *(path.name for path in layers.configs),
        *(f"--vary {text}" for text in vary),
        *(f"--set {text}" for text in layers.overrides),
        *(f"--preset {name}" for name in layers.presets),
        *(f"{name} {value}" for name, value in given.items() if value is not None),
    ]


def _variants(layers: Layers, vary: Sequence[str]) -> list[tuple[str, Layers]]:
    """Title and layers of each variant. Raises ConfigError where there are not two to eight."""
    from trainer.engine.comparing.variants import LETTERS, varied

    if vary:
        found = [
            (", ".join(values), dataclasses.replace(layers, overrides=(*layers.overrides, *values)))
            for values in varied(vary)
        ]
    else:
        found = [(path.name, dataclasses.replace(layers, configs=(path,))) for path in layers.configs]
        if len({title for title, _ in found}) < len(found):
            found = [(str(one.configs[0]), one) for _, one in found]
    if not 2 <= len(found) <= len(LETTERS):
        what = "one configuration is named" if len(found) == 1 else f"{len(found)} configurations are named"
        remedy = f"name two files, or one with --vary KEY=V1,V2; {len(LETTERS)} are the most"
        raise ConfigError(what, where="trainer compare", remedy=remedy)
    return found


def _planned(named: Sequence[tuple[str, Layers]], *, own_seed: bool) -> list[Variant]:
    """The variants with their plans; kernels without a verdict are measured, once all GPUs are idle.

    Raises ConfigError, DataError and HardwareError as a run of them would, HardwareError too where a GPU is
    busy.
    """
    from trainer.cli.measure import planned
    from trainer.config.schema import changed
    from trainer.engine.comparing import child
    from trainer.engine.comparing.variants import LETTERS, SHARED, Variant
    from trainer.planning.data_rows import require_dataset, require_present, require_template
    from trainer.planning.epochs import with_epochs

    for _, layers in named:
        require_dataset(layers.dataset)
    loaded = [with_epochs(layers.load()) for _, layers in named]
    for one in loaded:
        # without what SHARED leaves out: held-out samples are not read
        require_present(dataclasses.replace(one, config=changed(one.config, SHARED)))
        require_template(one)
        child.require_idle(child.gpus_of(planned(one, probe=False)[1]), patience=0.0)
    return [
        Variant(
            letter=letter,
            title=title,
            own_seed=own_seed,
            config=one.config,
            plan=planned(one, probe=True)[1],
        )
        for letter, (title, _), one in zip(LETTERS, named, loaded, strict=False)
    ]


def _require_writable(output: Path | None, record: Path | None, plot: Path | None) -> None:
    """Raise ConfigError where what is asked for could not be written."""
    from trainer.cli.targets import require_new_folder, require_picture, require_writable
    from trainer.engine.comparing.plot import require_matplotlib

    if output is not None:
        require_new_folder(output, "--output")
    if record is not None:
        require_writable(record, "--json")
    if plot is not None:
        require_picture(plot, "--plot")
        require_matplotlib()
