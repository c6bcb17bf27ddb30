"""`trainer sample` and `trainer verify-lora`: pictures drawn with a LoRA file, and checks of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from trainer.cli.loras import require_family_of, with_file
from trainer.cli.options import GivenPath, Layers, LoraFile, drawing_arguments, layer_options
from trainer.cli.output import say, shown_below_options
from trainer.cli.targets import require_picture
from trainer.errors import ConfigError, one_line
from trainer.words.plurals import numbered

if TYPE_CHECKING:
    from trainer.config.reading.load import Loaded

_FILE, _FOLDER = LoraFile(), GivenPath(exists=True, file_okay=False)


@shown_below_options
@click.command()
@drawing_arguments
@click.option(
    "--lora", type=_FILE, help="LoRA to load, a file or a run's folder; the base model alone when not given."
)
@click.option("--model", "model", type=_FOLDER, help="A full fine-tune: its run's folder, or model/ in it.")
@click.option("--before-after", is_flag=True, help="Draw each prompt with the base model alone too.")
@click.option("--prompt", "prompts", multiple=True, help="Text to draw; the configuration's when not given.")
@click.option(
    "--try", "folder", type=_FOLDER, help="Draw what its try.json says, into this folder, and no more."
)
@click.option(
    "--picture",
    type=GivenPath(),
    default=Path("sample.png"),
    show_default=True,
    help="PNG to write, with all prompts; the first 80 of --before-after.",
)
def sample(
    layers: Layers,
    lora: Path | None,
    model: Path | None,
    before_after: bool,
    prompts: tuple[str, ...],
    folder: Path | None,
    picture: Path,
) -> int:
    """Draw prompts with the base model and a LoRA, or a full fine-tune, through the family's own pipeline.
    \f
    Examples:
      trainer sample my.yaml --lora runs/my-lora --prompt "a red apple"
      trainer sample my.yaml --lora my-lora.safetensors --before-after
      trainer sample my.yaml --model runs/my-model --before-after
      trainer sample my.yaml --prompt "a red apple" --prompt "a dog" --picture base.png
      trainer sample runs/my-lora/config.resolved.yaml --try runs/my-lora/tries/1
    """
    from trainer.cli.jobs import run_job
    from trainer.cli.measure import planned
    from trainer.config.schema import changed
    from trainer.engine.spec import Job

    _refuse_output(layers)
    if folder is not None:
        named = click.get_current_context().get_parameter_source("picture") is not ParameterSource.DEFAULT
        alone = not (lora or model or before_after or prompts or named)
        return _draw_try(layers, folder.resolve(), alone=alone)
    loaded = for_one_process(layers.load())
    if not all(prompt.strip() for prompt in prompts):
        raise ConfigError("an empty prompt", where="--prompt", remedy="write what to draw")
    if prompts:
        loaded = dataclasses.replace(loaded, config=changed(loaded.config, {"validation.prompts": prompts}))
    if not loaded.config.validation.prompts:
        raise ConfigError("nothing to draw", where="validation.prompts", remedy="give --prompt TEXT")
    _require_one(lora, model, before_after)
    require_picture(picture, "--picture")
    if lora is not None:
        loaded = with_file(loaded, lora)
    if model is not None:
        model = _model_in(model, loaded.config.family)
    job = Job(
        mode="sample",
        lora_file=str(lora.resolve()) if lora else "",
        model_folder=str(model.resolve()) if model else "",
        output_file=str(picture.resolve()),
        before_after=before_after,
    )
    return run_job(loaded, *planned(loaded, probe=False), job)


def _refuse_output(layers: Layers) -> None:
    """Raise ConfigError for a run's folder: who gives one means that of the picture."""
    if layers.output is not None:
        what = "it names a run's folder, and here is no run"
        remedy = "name the picture by --picture FILE; a missing output_dir is given by --set output_dir=DIR"
        raise ConfigError(what, where=f"--output {layers.output}", remedy=remedy)


def _require_one(lora: Path | None, model: Path | None, before_after: bool) -> None:
    """Raise ConfigError unless a LoRA, a model or neither is drawn; before and after need one."""
    if before_after and lora is None and model is None:
        what = "there is no after without a LoRA or a model"
        raise ConfigError(what, where="--before-after", remedy="give --lora FILE, or --model FOLDER")
    if lora is not None and model is not None:
        what = "a LoRA belongs to the base model, and this is another one"
        remedy = "name one of both; a LoRA over a full fine-tune wants that as its base model"
        raise ConfigError(what, where="--model", remedy=remedy)


def _draw_try(layers: Layers, folder: Path, *, alone: bool) -> int:
    """Draw the pictures of a try into its folder; `alone`: no other option says what to draw."""
    from trainer.cli.jobs import run_job
    from trainer.cli.measure import planned
    from trainer.engine.spec import Job
    from trainer.telemetry.run_folder import tries

    if not alone:
        remedy = "leave --lora, --model, --before-after, --prompt and --picture out, or --try"
        raise ConfigError("its try.json says what to draw", where=f"--try {folder}", remedy=remedy)
    one, loaded = tries.read_record(folder), layers.load(variables=False)
    for name in one.loras:
        require_family_of(tries.run_of(folder) / name, loaded.config.family)
    loaded = tries.with_try(loaded, one)
    return run_job(loaded, *planned(loaded, probe=False), Job(mode="sample", try_folder=str(folder)))


@shown_below_options
@click.command(name="verify-lora")
@click.argument("file", type=_FILE)
@click.option("--config", "configs", multiple=True, type=GivenPath(), help="Also load it onto this base.")
@layer_options
def verify_lora(file: Path, layers: Layers) -> int:
    """Check a LoRA file: readable, finite, not zero; with a configuration also that it changes the output.
    \f
    Examples:
      trainer verify-lora my-lora.safetensors                   # the file alone, on any machine
      trainer verify-lora my-lora.safetensors --config my.yaml  # on a fresh base model
    """
    if not layers.given():
        from trainer.engine.results.file_check import check_file

        say(f"{one_line(file)}: {numbered(check_file(file), 'layer')}, all finite, not zero")
        return 0
    from trainer.cli.jobs import run_job
    from trainer.cli.measure import planned
    from trainer.engine.spec import Job

    loaded = for_one_process(layers.load())
    loaded = with_file(loaded, file)
    job = Job(mode="verify", lora_file=str(file.resolve()))
    return run_job(loaded, *planned(loaded, probe=False), job)


def for_one_process(loaded: Loaded) -> Loaded:
    """The configuration for a job of one process, which has a base of its own."""
    from trainer.config.schema import changed

    return dataclasses.replace(
        loaded, config=changed(loaded.config, {"parallel.gpus": 1, "parallel.shard": "none"})
    )


def _model_in(folder: Path, family_name: str) -> Path:
    """The folder of a full fine-tune, which may be given as its run's.

    Raises ConfigError where the trained component's weights are not in it, or it is of another family.
    """
    from trainer import families
    from trainer.files.weight_files import weight_files
    from trainer.planning.base_check import require_trained

    family, inside, where = families.get(family_name), folder / "model", f"--model {folder}"
    found = inside if inside.is_dir() else folder
    component = found / family.trained_component
    if not (component / "config.json").is_file() or not weight_files(component).files:
        what = f"there are no weights of a {family.trained_component or 'language model'} in it"
        remedy = "name the run's folder of a full fine-tune that ended, or `model` in it"
        raise ConfigError(what, where=where, remedy=remedy)
    require_trained(family, found, where)
    return found
