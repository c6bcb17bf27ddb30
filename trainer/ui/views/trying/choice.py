"""The form of a try: runs that have a LoRA, its files by step, and what is drawn with them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer import families
from trainer.config import environment
from trainer.config.reading.load import Loaded
from trainer.errors import ConfigError, DataError, Problem
from trainer.families.loading import load_config
from trainer.families.lora_file import require_family
from trainer.files.steps import by_step
from trainer.telemetry.run_folder import results
from trainer.telemetry.run_folder.process import working_folder
from trainer.telemetry.run_folder.tries import (
    LEAST_SIDE,
    MOST_CHARACTERS,
    MOST_LORAS,
    MOST_PROMPTS,
    MOST_SIDE,
    MOST_STRENGTH,
    Try,
)
from trainer.telemetry.rundir import CONFIG_FILE
from trainer.ui.opened import open_below
from trainer.ui.studio import Studio, UnknownIdError, identifier
from trainer.ui.views.runs import name_of, run_folder, run_folders

_NO_FILE = "wait for its end; checkpoint.lora_files: true has one written with each checkpoint"
_FULL = "`trainer sample --model` draws with a full fine-tune"
_COMFYUI = ".comfyui.safetensors"
LORAS = "LoRA files"
GONE = Problem(what="it was removed meanwhile", where=LORAS, remedy="mark another")
_NUMBERS = {
    "seed": ("Seed", 0, 2**32 - 1),
    "resolution": ("Size", LEAST_SIDE, MOST_SIDE),
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
    """Id and name of each run that has a LoRA, the one with the newest first; and of the chosen run."""
    id: str = ""
    name: str = ""
    loras: tuple[LoraView, ...] = ()
    draws: bool = True
    """Whether the family makes pictures; else it writes answers."""
    takes_negative: bool = False
    size_step: int = 1
    """Pixels of which a picture's side is a multiple."""
    below: Typed = Typed()
    """The run's own values, which count where nothing is typed."""
    typed: Typed = Typed()
    problems: tuple[Problem, ...] = ()

    @property
    def least_size(self) -> int:
        """The least side of a picture in pixels, a multiple of `size_step`."""
        return -(-LEAST_SIDE // self.size_step) * self.size_step


def choice_view(studio: Studio, run: str, typed: Typed | None = None) -> ChoiceView:
    """The form for a run, the one with the newest LoRA where none is named. Raises UnknownIdError."""
    timed = [(_lora_time(folder), folder) for folder in run_folders(studio)]
    folders = [folder for changed, folder in sorted(timed, reverse=True) if changed]
    runs = tuple((identifier(studio.runs, one), name_of(studio.runs, one)) for one in folders)
    if not (run or runs):
        return ChoiceView(runs=())
    run = run or runs[0][0]
    folder = run_folder(studio, run)
    if run not in dict(runs):
        runs = ((run, name_of(studio.runs, folder)), *runs)
    view = ChoiceView(runs=runs, id=run, name=name_of(studio.runs, folder))
    try:
        config = configuration(folder).config
    except ConfigError as error:
        return replace(view, problems=error.problems)
    files, validation, family = lora_files(folder), config.validation, families.get(config.family)
    side, step = validation.resolution or config.data.resolution, family.pixel_multiple
    below = Typed(
        prompts="\n".join(" ".join(one.split()) for one in validation.prompts[:MOST_PROMPTS]),
        seed=str(validation.seed),
        resolution=str(side // step * step),
        num_inference_steps=str(validation.num_inference_steps),
        loras=tuple(identifier(folder, path) for path in files[:1]),
    )
    remedy = _NO_FILE if config.method == "lora" else _FULL
    problem = Problem(what="this run has no LoRA file", where=folder.name, remedy=remedy)
    return replace(
        view,
        loras=tuple(LoraView(id=identifier(folder, path), name=time_of(folder, path)) for path in files),
        draws=family.sample_kind == "image",
        takes_negative=family.takes_negative and validation.guidance_scale > 1,
        size_step=step,
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


def _lora_time(folder: Path) -> float:
    """Time of the newest folder of LoRA files of a run, in Unix seconds; 0 where it has none.

    Reads few folders of a run, and no sizes.
    """
    steps = by_step(path.parent for path in folder.glob(f"checkpoints/step-*/{results.LORA_FOLDER}"))
    newest = [path / results.LORA_FOLDER for _, path in steps[-1:]]
    found = [0.0]
    for place in (folder / results.LORA_FOLDER, folder / "best", *newest):
        with contextlib.suppress(FileNotFoundError):  # a checkpoint that was removed meanwhile
            found += [place.stat().st_mtime] if any(place.glob("*.safetensors")) else []
    return max(found)


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
        loras=tuple(
            identifier(folder, path) for path in lora_files(folder) if time_of(folder, path) in one.labels
        ),
    )


def asked(studio: Studio, view: ChoiceView) -> Try:
    """The try that the form asks for, with LoRA files that can be used, where the run has them. Raises
    ConfigError with everything that is wrong, DataError for a file.
    """
    folder, typed = run_folder(studio, view.id), view.typed
    problems = list(view.problems)
    prompts = [line.strip() for line in typed.prompts.splitlines() if line.strip()]
    _count(problems, "Prompts", len(prompts), MOST_PROMPTS, "write one a line")
    if any(len(text) > MOST_CHARACTERS for text in (*prompts, typed.negative_prompt)):
        remedy = f"write {MOST_CHARACTERS:,} characters at most"
        problems.append(Problem(what="a text is too long", where="Prompts", remedy=remedy))
    paths = _marked(problems, folder, typed.loras)
    numbers = {
        key: _number(problems, label, vars(typed)[key].strip() or vars(view.below)[key], least, most)
        for key, (label, least, most) in _NUMBERS.items()
        if view.draws or key == "seed"
    }
    if view.draws:
        _require_multiple(problems, int(numbers["resolution"]), view.size_step)
    strength = _number(problems, "Strength", typed.strength.strip() or "1", 0, MOST_STRENGTH, whole=False)
    if problems:
        raise ConfigError(problems)
    _require_usable(studio, folder, paths)
    return Try(
        prompts=tuple(prompts),
        loras=tuple(path.relative_to(folder).as_posix() for path in paths),
        labels=tuple(time_of(folder, path) for path in paths),
        strength=float(strength),
        seed=int(numbers["seed"]),
        resolution=int(numbers["resolution"]) if view.draws else None,
        num_inference_steps=int(numbers["num_inference_steps"]) if view.draws else None,
        negative_prompt=" ".join(typed.negative_prompt.split()) if view.takes_negative else "",
    )


def _count(problems: list[Problem], label: str, count: int, most: int, remedy: str) -> None:
    if not 1 <= count <= most:
        problems.append(Problem(what=f"{count} are given, 1 to {most} can be", where=label, remedy=remedy))


def _marked(problems: list[Problem], folder: Path, ids: Sequence[str]) -> list[Path]:
    """The run's LoRA files with these ids; a wrong number of them, and one that is gone, become problems."""
    _count(problems, LORAS, len(ids), MOST_LORAS, "mark those that are drawn")
    there = {identifier(folder, path): path for path in lora_files(folder)}
    if len(ids) <= MOST_LORAS and not there.keys() >= set(ids):
        problems.append(GONE)
    return [there[one] for one in ids if one in there]


def _require_multiple(problems: list[Problem], side: int, step: int) -> None:
    if side % step:
        below = side // step * step
        what, remedy = f"{side} is no multiple of {step}", f"write {below} or {below + step}"
        problems.append(Problem(what=what, where="Size", remedy=remedy))


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
    """Raise DataError for a LoRA file of another family, and for a result that was not proved; ConfigError
    for a file that is gone.
    """
    family = configuration(folder).config.family
    for path in paths:
        try:
            with open_below(studio.runs, path) as file:
                require_family(file, str(path), family)
        except UnknownIdError as error:
            raise ConfigError([GONE]) from error
        proof = path.with_suffix(results.PROOF_SUFFIX)
        if path.parent == folder / results.LORA_FOLDER and not proof.is_file():
            what = "it has no proof beside it: the run's end did not load it from the disk and compare"
            remedy = "resume the run, which ends with the proof, or see what `trainer verify-lora` says"
            raise DataError(what, where=str(path), remedy=remedy)
