"""The form of a try: runs that have a LoRA, its files by step, and what is drawn with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer import families
from trainer.config import environment
from trainer.config.reading.load import Loaded
from trainer.errors import ConfigError, DataError, Problem
from trainer.families.loading import load_config
from trainer.families.lora_file import require_family
from trainer.telemetry.run_folder import results
from trainer.telemetry.run_folder.process import working_folder
from trainer.telemetry.run_folder.tries import MOST_CHARACTERS, MOST_LORAS, MOST_PROMPTS, MOST_STRENGTH, Try
from trainer.telemetry.rundir import CONFIG_FILE
from trainer.ui.opened import open_below
from trainer.ui.studio import Studio, found_by_id, identifier
from trainer.ui.views.runs import name_of, run_folder, run_folders

_NO_FILE = "wait for its end; checkpoint.lora_files: true has one written with each checkpoint"
_COMFYUI = ".comfyui.safetensors"
_NUMBERS = {
    "seed": ("Seed", 0, 2**32 - 1),
    "resolution": ("Size", 32, 4096),
    "num_inference_steps": ("Steps", 1, 1000),
}
"""Whole numbers of the form: their label, the least and the most."""


@dataclass(frozen=True, kw_only=True)
class Typed:
    """The texts of the form."""

    prompts: str = ""
    """One a line."""
    negative_prompt: str = ""
    seed: str = "0"
    resolution: str = ""
    num_inference_steps: str = ""
    strength: str = "1"
    loras: tuple[str, ...] = ()
    """Ids of LoRA files."""


@dataclass(frozen=True, kw_only=True)
class LoraView:
    """A LoRA file of a run."""

    id: str
    name: str
    """Its time in the run: `final`, `best`, `step 250`."""


@dataclass(frozen=True, kw_only=True)
class ChoiceView:
    """The form for one run; without a run where none has a LoRA."""

    runs: tuple[tuple[str, str], ...]
    """Id and name of each run that has a LoRA."""
    id: str = ""
    name: str = ""
    loras: tuple[LoraView, ...] = ()
    draws: bool = True
    """Whether the family makes pictures; else it writes answers."""
    takes_negative: bool = False
    below: Typed = Typed()
    """The run's own values, which count where nothing is typed."""
    typed: Typed = Typed()
    problems: tuple[Problem, ...] = ()


def choice_view(studio: Studio, run: str, typed: Typed | None = None) -> ChoiceView:
    """The form for a run, the first that has a LoRA where none is named. Raises UnknownIdError."""
    folders = [folder for folder in run_folders(studio) if lora_files(folder)]
    runs = tuple(sorted((identifier(studio.runs, one), name_of(studio.runs, one)) for one in folders))
    if not (run or runs):
        return ChoiceView(runs=())
    run = run or runs[0][0]
    folder = run_folder(studio, run)
    view = ChoiceView(runs=runs, id=run, name=name_of(studio.runs, folder))
    try:
        config = configuration(folder).config
    except ConfigError as error:
        return replace(view, problems=error.problems)
    files, validation, family = lora_files(folder), config.validation, families.get(config.family)
    below = Typed(
        prompts="\n".join(" ".join(one.split()) for one in validation.prompts[:MOST_PROMPTS]),
        seed=str(validation.seed),
        resolution=str(validation.resolution or config.data.resolution),
        num_inference_steps=str(validation.num_inference_steps),
        loras=tuple(identifier(folder, path) for path in files[:1]),
    )
    problem = Problem(what="this run has no LoRA file", where=folder.name, remedy=_NO_FILE)
    return replace(
        view,
        loras=tuple(LoraView(id=identifier(folder, path), name=time_of(folder, path)) for path in files),
        draws=family.sample_kind == "image",
        takes_negative=family.takes_negative and validation.guidance_scale > 1,
        below=below,
        typed=typed or below,
        problems=() if files else (problem,),
    )


def configuration(folder: Path) -> Loaded:
    """A run's configuration as its folder keeps it. Raises ConfigError."""
    return load_config(
        [folder / CONFIG_FILE],
        output=folder,
        environ=environment.without_settings(),
        working_folder=working_folder(folder),
    )


def lora_files(folder: Path) -> tuple[Path, ...]:
    """LoRA files of a run: the result's, the best one's, then those of checkpoints, the latest first."""
    final = [one.path for one in results.files(folder) if _is_lora(folder, one.path)]
    steps = [one.path for found in reversed(results.checkpoints(folder)) for one in found.lora]
    return tuple(path for path in (*final, *steps) if not path.name.endswith(_COMFYUI))


def _is_lora(folder: Path, path: Path) -> bool:
    place = path.relative_to(folder).parts[0]
    return path.suffix == ".safetensors" and place in (results.LORA_FOLDER, "best")


def time_of(folder: Path, path: Path) -> str:
    """The time of a LoRA file in its run, in words."""
    first, *rest = path.relative_to(folder).parts
    if first == "checkpoints":
        return f"step {''.join(rest[:1]).removeprefix('step-').lstrip('0')}"
    return "final" if first == results.LORA_FOLDER else "best"


def typed_as(studio: Studio, run: str, one: Try) -> Typed:
    """The form of an earlier try of a run. Raises UnknownIdError."""
    folder = run_folder(studio, run)
    return Typed(
        prompts="\n".join(one.prompts),
        negative_prompt=one.negative_prompt,
        seed=str(one.seed),
        resolution="" if one.resolution is None else str(one.resolution),
        num_inference_steps="" if one.num_inference_steps is None else str(one.num_inference_steps),
        strength=f"{one.strength:g}",
        loras=tuple(identifier(folder, folder / name) for name in one.loras),
    )


def asked(studio: Studio, view: ChoiceView) -> Try:
    """The try that the form asks for, with LoRA files that can be used. Raises ConfigError with everything
    that is wrong, DataError for a file, UnknownIdError for one that is not there.
    """
    folder, typed = run_folder(studio, view.id), view.typed
    problems = list(view.problems)
    prompts = [line.strip() for line in typed.prompts.splitlines() if line.strip()]
    _count(problems, "Prompts", len(prompts), MOST_PROMPTS, "write one a line")
    if any(len(text) > MOST_CHARACTERS for text in (*prompts, typed.negative_prompt)):
        remedy = f"write {MOST_CHARACTERS:,} characters at most"
        problems.append(Problem(what="a text is too long", where="Prompts", remedy=remedy))
    _count(problems, "LoRA files", len(typed.loras), MOST_LORAS, "mark those that are drawn")
    numbers = {
        key: _number(problems, label, vars(typed)[key].strip() or vars(view.below)[key], least, most)
        for key, (label, least, most) in _NUMBERS.items()
        if view.draws or key == "seed"
    }
    strength = _number(problems, "Strength", typed.strength.strip() or "1", 0, MOST_STRENGTH, whole=False)
    if problems:
        raise ConfigError(problems)
    paths = [found_by_id(folder, one, lora_files(folder)) for one in typed.loras]
    _require_usable(studio, folder, paths)
    return Try(
        prompts=tuple(prompts),
        loras=tuple(path.relative_to(folder).as_posix() for path in paths),
        strength=float(strength),
        seed=int(numbers["seed"]),
        resolution=int(numbers["resolution"]) if view.draws else None,
        num_inference_steps=int(numbers["num_inference_steps"]) if view.draws else None,
        negative_prompt=" ".join(typed.negative_prompt.split()) if view.takes_negative else "",
    )


def _count(problems: list[Problem], label: str, count: int, most: int, remedy: str) -> None:
    if not 1 <= count <= most:
        problems.append(Problem(what=f"{count} are given, 1 to {most} can be", where=label, remedy=remedy))


def _number(
    problems: list[Problem], label: str, text: str, least: float, most: float, *, whole: bool = True
) -> float:
    """The number that a text is; what is wrong with it becomes a problem."""
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        what, kind = f"{text[:40]!r} is none", "a whole number" if whole else "a number"
        problems.append(Problem(what=what, where=label, remedy=f"write {kind} from {least} to {most}"))
        return least
    return value


def _require_usable(studio: Studio, folder: Path, paths: Sequence[Path]) -> None:
    """Raise DataError for a LoRA file of another family, and for a result that was not proved."""
    family = configuration(folder).config.family
    for path in paths:
        with open_below(studio.runs, path) as file:
            require_family(file, str(path), family)
        if path.parent == folder / results.LORA_FOLDER and not path.with_suffix(".proof.json").is_file():
            what = "it has no proof beside it: the run's end did not load it from the disk and compare"
            remedy = "resume the run, which ends with the proof, or see what `trainer verify-lora` says"
            raise DataError(what, where=str(path), remedy=remedy)
