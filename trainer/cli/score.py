"""`trainer score`: metrics of a run's previews, or of any folder of pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import GivenPath, Layers
from trainer.cli.output import say, shown_below_options
from trainer.errors import ConfigError, DataError, one_line
from trainer.words.plurals import numbered
from trainer.words.tables import aligned

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig
    from trainer.engine.scoring.score import Picture, Scorer, Scores

_FOLDER, _FILE = GivenPath(exists=True, file_okay=False), GivenPath(exists=True)
_METRICS = ("clip_t", "dinov2", "nearest_train", "diversity", "kid", "fid")


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The command line."""

    run: Path | None
    pictures: Path | None
    prompts: Path | None
    data: tuple[Path, ...]
    clip: str | None
    dinov2: str | None
    metrics: tuple[str, ...]
    threshold: float | None


@shown_below_options
@click.command()
@click.argument("run", metavar="[RUN]", required=False, type=_FOLDER)
@click.option("--pictures", metavar="DIR", type=_FOLDER, help="Measure these pictures in place of a run's.")
@click.option(
    "--prompts",
    metavar="FILE",
    type=_FILE,
    help="Their prompts, a line each, in the order of the pictures' names; those inside PNGs of this trainer"
    " when not given.",
)
@click.option(
    "--data", metavar="DIR", multiple=True, type=_FOLDER, help="Training pictures; a run's own ones."
)
@click.option("--clip", metavar="MODEL", help="CLIP model: a folder or repository; validation.clip_model.")
@click.option("--dinov2", metavar="MODEL", help="DINOv2 model likewise; validation.dinov2_model.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    type=click.Choice(_METRICS),
    help="Measure this alone, or refuse; all that mean something when not given.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1),
    help="Cosine above which a picture is told as a copy; validation.copy_threshold, 0.95.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def score(as_json: bool, **given: object) -> None:
    """Measure pictures: do they show their prompts, are they like the training pictures, or copies of them?
    \f
    Examples:
      trainer score runs/my-lora
      trainer score runs/my-lora --clip models/clip --dinov2 models/dinov2 --json
      trainer score --pictures out --prompts prompts.txt --data /data --metric kid --metric nearest_train

    clip_t         mean cosine of picture and prompt by CLIP: higher follows prompts more closely
    dinov2         mean cosine of pictures to the training pictures by DINOv2: higher is more like them
    nearest_train  highest cosine of a picture to one training picture; above --threshold it is told as a copy
    diversity      mean distance of pictures of one prompt: near 0 all seeds give one picture
    kid            kernel inception distance to the training pictures, mean and deviation; from 50 of both
    fid            Frechet inception distance; refused below 10,000 of both

    Only figures of the same models, prompts and settings compare. Models run on the CPU, in float32.
    """
    from trainer.modeling.quiet import quiet_libraries

    quiet_libraries()
    asked = _Asked(**given)  # type: ignore[arg-type]  # click's parameters have these names and types
    if (asked.run is None) == (asked.pictures is None):
        raise ConfigError("name a run, or pictures", where="trainer score", remedy="RUN, or --pictures DIR")
    config = None if asked.run is None else _config_of(asked.run)
    groups = _groups(asked)
    scorer = _scorer(asked, config, [*groups.values()])
    found = {name: scorer.scores(one, asked.metrics or _METRICS) for name, one in groups.items()}
    if as_json:
        click.echo(_json(scorer, found))
    else:
        _print(scorer, found)


def _config_of(run: Path) -> RunConfig:
    """The configuration that a run was trained with; relative paths begin where it was started. Raises
    ConfigError where the folder has none or the run's model writes text, StorageError where it may not be
    read.
    """
    from trainer import families
    from trainer.files import atomic
    from trainer.telemetry.run_folder.process import working_folder
    from trainer.telemetry.rundir import CONFIG_FILE
    from trainer.telemetry.runs import is_run

    with atomic.reading_told(run):
        accepted = is_run(run)
    if not accepted:
        remedy = f"name the output_dir of a run, which has a {CONFIG_FILE}, or --pictures DIR"
        raise ConfigError("no run is in this folder", where=str(run), remedy=remedy)
    kept = Layers(configs=[run / CONFIG_FILE])
    config = kept.load(variables=False, working_folder=working_folder(run)).config
    family = families.get(config.family)
    if family.sample_kind != "image":
        what = f"it is a run of {family.title}, which writes text, and these metrics are of pictures"
        raise ConfigError(what, where="RUN", remedy="its held-out loss is in `trainer runs list`")
    return config


def _groups(asked: _Asked) -> dict[str, list[Picture]]:
    """The pictures to measure, by the step that drew them; of a folder in one group of no name."""
    from trainer.files.steps import by_step

    if asked.pictures is not None:
        return {"": _prompted(asked, _listed(asked.pictures, "--pictures"))}
    assert asked.run is not None
    steps = by_step(path for path in (asked.run / "samples").glob("step-*") if path.is_dir())
    if not steps:
        remedy = "write validation.prompts, or draw pictures and name them by --pictures DIR"
        raise DataError("the run has drawn no previews", where=str(asked.run / "samples"), remedy=remedy)
    return {str(step): _prompted(asked, _listed(path, "samples")) for step, path in steps}


def _listed(folder: Path, where: str) -> list[Picture]:
    """The pictures of a folder and of those below it, by name. Raises DataError without any."""
    from trainer.data.pictures.formats import FORMATS_TEXT, SUFFIXES
    from trainer.engine.scoring.score import Picture

    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"no picture is in {folder}", where=where, remedy=f"{FORMATS_TEXT}")
    return [Picture(path=path, name=str(path.relative_to(folder.parent))) for path in files]


def _prompted(asked: _Asked, pictures: list[Picture]) -> list[Picture]:
    """The pictures with their prompts: lines of a file, else what a PNG of this trainer says itself.

    Raises DataError where a file has not as many lines as there are pictures.
    """
    import dataclasses

    from trainer.engine.results.pictures import read_png

    if asked.prompts is None:
        prompts = []
        for one in pictures:
            try:
                png = one.path.suffix.lower() == ".png"
                prompts.append(read_png(one.path)[1].get("prompt") if png else None)
            except OSError as error:
                remedy = "remove it, or write it again"
                raise DataError(f"cannot be read ({error})", where=str(one.path), remedy=remedy) from error
    else:
        try:
            lines = asked.prompts.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot be read ({error})", where=str(asked.prompts)) from error
        prompts = [line.strip() for line in lines if line.strip()]
        _require_one_order(pictures, asked)
        if len(prompts) != len(pictures):
            raise DataError(
                f"{numbered(len(prompts), 'prompt')} for {numbered(len(pictures), 'picture')},"
                f" first {pictures[0].name}",
                where=str(asked.prompts),
                remedy="write a line for each picture, in the order of their names",
            )
    return [dataclasses.replace(one, prompt=text) for one, text in zip(pictures, prompts, strict=True)]


def _require_one_order(pictures: Sequence[Picture], asked: _Asked) -> None:
    """Raises DataError where names by their numbers have another order than by their letters: whose line is
    whose nobody can say then.
    """
    names = [one.name for one in pictures]
    if names != sorted(names, key=_by_number):
        raise DataError(
            "names of pictures have numbers of unequal lengths, so that 10 comes before 2",
            where=str(asked.pictures or asked.run),
            remedy="write the numbers with zeros before them, 02, and the prompts in that order",
        )


def _by_number(name: str) -> list[tuple[int, str]]:
    """A key by which 2 comes before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _scorer(asked: _Asked, config: RunConfig | None, groups: Sequence[Sequence[Picture]]) -> Scorer:
    """The models and training pictures; models that no metric needs are not looked for.

    Raises DataError where a metric that was asked for means nothing for some pictures, or none does.
    """
    from trainer.config.schema import ValidationSection
    from trainer.engine.scoring.models import OF_CLIP, resolve
    from trainer.engine.scoring.score import Scorer

    validation = ValidationSection() if config is None else config.validation
    threshold = validation.copy_threshold if asked.threshold is None else asked.threshold
    scorer = Scorer(clip=None, dinov2=None, training=_training(asked, config), threshold=threshold)
    obstacles = {
        metric: [scorer.obstacle(metric, pictures) for pictures in groups]
        for metric in asked.metrics or _METRICS
    }
    measured = {metric for metric, whys in obstacles.items() if not all(whys)}
    refused = [(metric, why) for metric, whys in obstacles.items() for why in whys if why]
    if refused and (asked.metrics or not measured):
        metric, why = refused[0]
        remedy = "--data names training pictures, --prompts the pictures' prompts"
        if asked.metrics:
            remedy = f"leave --metric out for all that mean something; {remedy}"
        raise DataError(f"{metric} would mean nothing: {why}", where="trainer score", remedy=remedy)
    download = config is None or config.model.download != "never"
    if not OF_CLIP.isdisjoint(measured):
        place = "--clip" if asked.clip or config is None else "validation.clip_model"
        scorer.clip = resolve("clip", asked.clip or validation.clip_model, place, download=download)
    if measured - OF_CLIP:
        place = "--dinov2" if asked.dinov2 or config is None else "validation.dinov2_model"
        scorer.dinov2 = resolve("dinov2", asked.dinov2 or validation.dinov2_model, place, download=download)
    return scorer


def _training(asked: _Asked, config: RunConfig | None) -> tuple[Picture, ...]:
    """The training pictures: those of --data, else of a run's data sets."""
    if asked.data:
        return tuple(one for folder in asked.data for one in _listed(folder, "--data"))
    if config is None:
        return ()
    from trainer import families
    from trainer.engine.caching.samples import scan_samples
    from trainer.engine.training.scores import training_pictures

    return training_pictures(scan_samples(families.get(config.family), config))


def _cells(one: Scores) -> list[str]:
    """A row of the table below its first cell."""
    values = [f"{one.values[name]:.4f}" if name in one.values else "-" for name in _METRICS]
    if "kid_std" in one.values:
        values[_METRICS.index("kid")] += f" +- {one.values['kid_std']:.4f}"
    return [str(one.pictures), *values]


def _print(scorer: Scorer, found: Mapping[str, Scores]) -> None:
    """The table on stdout; what it was measured with, copies, and reasons for empty cells on stderr."""
    models = [one for one in (scorer.clip, scorer.dinov2) if one is not None]
    names = ", ".join(f"{one.kind} {one.name} ({one.identity})" for one in models)
    say(f"features: {names}; {len(scorer.training)} training pictures", err=True)
    steps = "" not in found
    rows = [["step", "pictures", *_METRICS], *([name, *_cells(one)] for name, one in found.items())]
    for line in aligned(rows if steps else [row[1:] for row in rows]):
        say(line)
    reasons = {metric: why for one in found.values() for metric, why in one.refused.items()}
    for metric, why in reasons.items():
        say(f"{metric} is not measured: {why}", err=True)
    for one in found.values():
        for copy in one.copies:
            names = f"{one_line(copy.picture)} is nearly the training picture {one_line(copy.training)}"
            say(f"warning: {names}: cosine {copy.cosine:.4f}, above {one.threshold:g}", err=True)
    cut = max(one.cut_prompts for one in found.values())
    if cut:
        say(
            f"clip_t reads the beginning of {numbered(cut, 'prompt, which is', 'prompts, which are')}"
            " longer than CLIP reads",
            err=True,
        )


def _json(scorer: Scorer, found: Mapping[str, Scores]) -> str:
    """All of it: models by their hash, and of every set values, refusals, and nearest training pictures."""
    models = {one.kind: one for one in (scorer.clip, scorer.dinov2) if one is not None}
    content = {
        "models": {kind: {"name": one.name, "identity": one.identity} for kind, one in models.items()},
        "training_pictures": len(scorer.training),
        "copy_threshold": scorer.threshold,
        "rounds": [
            {
                **({"step": int(name)} if name else {}),
                "pictures": one.pictures,
                "metrics": dict(one.values),
                "refused": dict(one.refused),
                "nearest": [{**vars(copy), "copy": copy in one.copies} for copy in one.nearest],
            }
            for name, one in found.items()
        ],
    }
    return json.dumps(content, indent=1)
