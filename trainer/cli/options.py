"""Arguments of the commands that read a configuration, handed to them as one value.

@click.command()
@config_arguments
def show(layers):
    loaded = layers.load()
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trainer.cli.output import say

if TYPE_CHECKING:
    from trainer.config.reading.load import Loaded

F = TypeVar("F", bound=Callable[..., Any])


class GivenPath(click.Path):
    """A path of the command line, never empty: `--output "$UNSET"` must not mean the working directory.

    Whether one that need not exist may be read is for `load` to say, with the remedy for that.
    """

    def __init__(self, *, exists: bool = False, file_okay: bool = True) -> None:
        super().__init__(exists=exists, file_okay=file_okay, readable=exists, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value as a Path."""
        if value == "":
            from trainer.errors import ConfigError

            where = "" if param is None else str(param.metavar if param.nargs == -1 else param.opts[0])
            remedy = "name a path; was it meant to come from a variable that is not set?"
            raise ConfigError('expected a path, got ""', where=where, remedy=remedy)
        return super().convert(value, param, ctx)


class LoraFile(GivenPath):
    """A LoRA's file, the folder that a run leaves it in (that of PEFT, or one file for diffusers), or the
    run's own folder.
    """

    def __init__(self) -> None:
        super().__init__(exists=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The file as a Path."""
        path = super().convert(value, param, ctx)
        if not path.is_dir():
            return path
        from trainer.telemetry.run_folder.results import LORA_FOLDER

        folder = path / LORA_FOLDER if (path / LORA_FOLDER).is_dir() else path
        found = [
            file for file in folder.glob("*.safetensors") if not file.name.endswith(".comfyui.safetensors")
        ]
        if len(found) != 1:
            from trainer.errors import ConfigError

            what = f"{path} is a folder with {len(found)} LoRA files"
            raise ConfigError(
                what, where="LoRA", remedy="name the file, FOLDER/NAME.safetensors, or a run's folder"
            )
        return found[0]


@dataclass(frozen=True)
class Layers:
    """The configuration as the command line gives it: files, and the values that lie over them."""

    configs: Sequence[Path]
    overrides: Sequence[str] = ()
    dataset: Path | None = None
    output: Path | None = None
    presets: Sequence[str] = ()
    budget: str | None = None
    gpus: str | None = None

    def given(self) -> bool:
        """Whether a configuration is named. Raises ConfigError where only options that lie over one are."""
        over = {
            "--preset": self.presets,
            "--set": self.overrides,
            "--dataset": self.dataset,
            "--output": self.output,
        }
        option = next((name for name, value in over.items() if value), None)
        if option and not self.configs:
            from trainer.errors import ConfigError

            remedy = f"name the configuration that it lies over, or leave {option} out"
            raise ConfigError("there is no configuration", where=option, remedy=remedy)
        return bool(self.configs)

    def load(self, *, variables: bool = True, working_folder: Path | None = None) -> Loaded:
        """Load the configuration against all known families, and tell of what has no effect: presets' values,
        other programs' variables. Without `variables`, TRAINER__* do not lie over the files: for those that a
        run has kept; `working_folder` is where relative paths in these begin, if not here.

        Raises ConfigError with every problem.
        """
        from trainer.config import environment
        from trainer.families.loading import load_config

        loaded = load_config(
            self.configs,
            overrides=self.overrides,
            dataset=self.dataset,
            output=self.output,
            budget=self.budget,
            gpus=self.gpus,
            presets=self.presets,
            environ=environment.snapshot() if variables else environment.without_settings(),
            working_folder=working_folder,
        )
        for kind, texts in (("warning", loaded.warnings), ("note", loaded.notes)):
            for text in texts:
                say(f"{kind}: {text}", err=True)
        return loaded


def layers_of(given: dict[str, Any]) -> Layers:
    """The layers among the parameters of a command, which are taken out of `given`."""
    names = {field.name for field in dataclasses.fields(Layers)}
    return Layers(**{name: given.pop(name) for name in names & given.keys()})


_CONFIGS = click.argument("configs", metavar="CONFIG...", nargs=-1, required=True, type=GivenPath())
_LAYERS = (
    click.option(
        "--preset",
        "presets",
        metavar="NAME[,NAME]",
        multiple=True,
        help="Lay a preset of train_configs/presets over the files; what it replaces is told. --set wins"
        " over it; to let your file win, name the preset's file before it.",
    ),
    click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Set one key: train.seed=1."),
    click.option(
        "--dataset",
        metavar="PATH",
        type=GivenPath(),
        help="Train on this folder, or file of conversations, instead of `data.sets`.",
    ),
)
_OUTPUT = click.option(
    "--output", metavar="DIR", type=GivenPath(), help="Write the run here instead of `output_dir`."
)
_NO_RUN = click.option(
    "--output", metavar="DIR", type=GivenPath(), hidden=True, help="Refused: there is no run to write."
)
_KEPT_RUNS = click.option(
    "--output",
    metavar="DIR",
    type=GivenPath(),
    help="Keep the runs in this new folder, without whole models; else they lie in a temporary one.",
)
_BUDGET = click.option(
    "--budget",
    metavar="SIZE",
    help="Keep within this much device memory: 20GiB. Wins over features.memory_budget.",
)
_GPUS = click.option(
    "--gpus",
    metavar="N",
    help="Share a step's samples among N GPUs, or processes on a CPU. Wins over parallel.gpus.",
)


def _taking(*parameters: Callable[[Any], Any]) -> Callable[[F], Any]:
    """A decorator that adds parameters of the command line and hands the function one `Layers` of them."""

    def decorate(function: F) -> Any:
        @functools.wraps(function)
        def command(**given: Any) -> Any:
            layers = layers_of(given)
            return function(layers=layers, **given)

        for parameter in reversed(parameters):
            command = parameter(command)
        return command

    return decorate


layer_options = _taking(*_LAYERS, _OUTPUT)
"""Decorator for a command that gets its configurations by an option, `configs`."""
config_arguments = _taking(_CONFIGS, *_LAYERS, _OUTPUT)
drawing_arguments = _taking(_CONFIGS, *_LAYERS, _NO_RUN)
"""Decorator for a command that writes pictures and no run, and says so of `Layers.output`."""
config_arguments_and_machine = _taking(_CONFIGS, *_LAYERS, _OUTPUT, _BUDGET, _GPUS)
compared_arguments = _taking(_CONFIGS, *_LAYERS, _KEPT_RUNS, _BUDGET, _GPUS)
"""Decorator for a command that runs several configurations, whose runs `Layers.output` keeps."""
