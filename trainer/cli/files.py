"""`trainer export` and `trainer merge`: a LoRA file in another layout, and in a whole model."""

from __future__ import annotations

from pathlib import Path

import click

from trainer.cli.options import GivenPath, Layers, LoraFile, config_arguments
from trainer.cli.output import say, shown_below_options
from trainer.words.plurals import numbered

_FILE = LoraFile()
_PATH = GivenPath()


@shown_below_options
@click.command()
@click.argument("file", type=_FILE)
@click.option(
    "--format",
    "form",
    type=click.Choice(("comfyui", "diffusers")),
    required=True,
    help="The program that the new file is for.",
)
@click.option("--to", "target", metavar="FILE", type=_PATH, help="The new file; beside FILE when not given.")
@click.option("--family", metavar="NAME", help="For a file that does not say its model family.")
def export(file: Path, form: str, target: Path | None, family: str | None) -> None:
    """Write a LoRA file in the other layout.
    \f
    Examples:
      trainer export runs/my-lora/lora/my-lora.safetensors --format comfyui
      trainer export my-lora.comfyui.safetensors --format diffusers --to my-lora.safetensors

    A run writes both files by itself. Both change the weights of the base alike.
    """
    from trainer.modeling.quiet import quiet_libraries

    quiet_libraries()
    from trainer.cli.targets import require_writable
    from trainer.engine.results.export import export as convert

    require_writable(target or file, "--to" if target else "beside")
    say(f"LoRA for {form}: {convert(file, form, target, family)}")


@shown_below_options
@click.command()
@config_arguments
@click.option("--lora", type=_FILE, required=True, help="LoRA file, for diffusers or of PEFT.")
@click.option("--to", "target", metavar="DIR", type=_PATH, required=True, help="New folder for the model.")
def merge(layers: Layers, lora: Path, target: Path) -> None:
    """Write the base model with a LoRA in it: a whole model that needs no LoRA.
    \f
    Examples:
      trainer merge my.yaml --lora runs/my-lora/lora/my-lora.safetensors --to my-model
      trainer merge my.yaml --set model.revision=main --lora my-lora.safetensors --to my-model

    Needs room on the disk for a second copy of the base model, and host memory for its largest file.
    """
    from trainer.modeling.quiet import quiet_libraries

    quiet_libraries()
    from trainer import families
    from trainer.cli.loras import require_family_of, with_template
    from trainer.cli.targets import require_writable
    from trainer.config.tree import placing
    from trainer.engine.results.merge import merge as merge_files
    from trainer.modeling.base.source import resolve_source

    loaded = layers.load()
    require_writable(target, "--to", folder=True)
    require_family_of(lora, loaded.config.family)
    loaded = with_template(loaded, lora)
    family = families.get(loaded.config.family)
    components = families.components(family)
    with placing(loaded.sources):
        source = resolve_source(loaded.config, components, trained=family.trained_component)
        changed = merge_files(loaded, source, lora, target, lambda line: say(line, err=True))
    say(f"model: {target}; {numbered(changed, 'layer')} of {source.identity} changed")
