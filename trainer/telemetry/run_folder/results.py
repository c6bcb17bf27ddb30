"""Files that a run leaves in its folder: previews, checkpoints and results. Reads no torch."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.files import atomic
from trainer.files.json_object import read_object
from trainer.telemetry.rundir import CONFIG_FILE

LORA_FOLDER = "lora"
"""Folder of a LoRA's files: in the run's folder the result's, in a checkpoint's those of its step."""
BEST_FOLDER, BEST_RECORD = "best", "best.json"
"""Folder of the LoRA with the lowest held-out loss, and its record there."""
PROOF_SUFFIX = ".proof.json"
"""End of the name of a LoRA's proof, in place of `.safetensors`."""
_BEST_TYPES: Mapping[str, Any] = {
    "file": str,
    "step": int,
    "validation_loss": float | int,
    "validation_data": str,
}
_MOST_BYTES = 1 << 16
_PASSED_OVER = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Errors of a folder that counts as empty: it goes while the run's own process prunes, or is closed."""
_STEP = re.compile(r"step-(\d{6,})")
_RESULTS = (LORA_FOLDER, "model", BEST_FOLDER)
_RECORDS = (
    "before_after.png", "samples/strip.png", CONFIG_FILE, "plan.json", "metrics.jsonl",
    "log.jsonl", "left_out.jsonl", "run.json",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A preview: the picture of a prompt at a step, or of an answer, whose text lies beside it."""

    step: int
    number: int
    """Place of its prompt among `validation.prompts` when it was drawn."""
    picture: Path
    answer: Path | None
    """Text of a language model's answer."""

    @functools.cached_property
    def drawn_as(self) -> Mapping[str, str]:
        """Texts inside the picture: `prompt`, `seed`, `num_inference_steps`, `guidance_scale`, `width`, ...;
        none where they cannot be read. Opens the file at its first use.
        """
        from PIL import Image

        try:
            with Image.open(self.picture, formats=("PNG",)) as picture:
                return {str(name): text for name, text in picture.info.items() if isinstance(text, str)}
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return {}

    @property
    def prompt(self) -> str:
        """The prompt, empty where it cannot be read."""
        return self.drawn_as.get("prompt", "")

    @property
    def seed(self) -> int | None:
        """The seed of its start noise, None where it cannot be read."""
        text = self.drawn_as.get("seed", "")
        return int(text) if text.isascii() and text.isdecimal() else None


@dataclass(frozen=True)
class SavedFile:
    """A file of a run's folder."""

    path: Path
    bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole by its name; only a resume reads its bytes."""

    step: int
    folder: Path
    bytes: int
    """Sizes of its files, those in `lora` among them."""
    lora: tuple[SavedFile, ...]
    """LoRA files of this step, where the run writes some (`checkpoint.lora_files`)."""


def samples(run_dir: Path) -> tuple[Sample, ...]:
    """Previews by step and prompt; of a step that is not complete none."""
    found: list[Sample] = []
    for step, folder in _steps(run_dir / "samples"):
        if not folder.with_suffix(".png").is_file():  # the row of all, written last
            continue
        for picture in (path for path in _here(folder) if path.suffix == ".png"):
            if picture.stem.isascii() and picture.stem.isdecimal():
                answer = picture.with_suffix(".txt")
                found.append(Sample(step, int(picture.stem), picture, answer if answer.is_file() else None))
    return tuple(found)


def checkpoints(run_dir: Path) -> tuple[Checkpoint, ...]:
    """Checkpoints by step, those that a killed save left aside among them; renamed folders are not."""
    found = []
    for step, folder in _checkpoint_folders(run_dir / "checkpoints"):
        size = sum(file.bytes for file in _files(_below(folder)))
        # of one that waits aside the next start changes the path
        lora = _files(_tensors(folder / LORA_FOLDER)) if _STEP.fullmatch(folder.name) else ()
        if folder.is_dir():  # else the run has removed it meanwhile
            found.append(Checkpoint(step, folder, size, lora))
    return tuple(found)


def has_checkpoint(run_dir: Path) -> bool:
    """True if a start in the run's folder finds a checkpoint by its name, whole or damaged."""
    return bool(_checkpoint_folders(run_dir / "checkpoints"))


def _checkpoint_folders(root: Path) -> list[tuple[int, Path]]:
    """Folders of checkpoints by step; the next start gives those that wait aside their names again."""
    aside = atomic.kept_aside(root)
    waiting = {int(name[1]): path for target, path in aside.items() if (name := _STEP.fullmatch(target.name))}
    return sorted((waiting | dict(_steps(root))).items())


def files(run_dir: Path) -> tuple[SavedFile, ...]:
    """Results, then records: the LoRA or model, the best one, pictures, configuration, plan, metrics, log."""
    results = [path for name in _RESULTS for path in sorted(_below(run_dir / name))]
    return _files([*results, *(run_dir / name for name in _RECORDS)])


def has_result(run_dir: Path) -> bool:
    """True if the run has saved the LoRA or the model that it was trained for."""
    model = (path for path in _below(run_dir / "model") if path.suffix == ".safetensors")
    return bool(_tensors(run_dir / LORA_FOLDER)) or any(model)


def lora_step(run_dir: Path) -> int | None:
    """The step of the LoRA that is the run's result, by its proof; None where no proof says it."""
    for path in _here(run_dir / LORA_FOLDER):
        if not path.name.endswith(PROOF_SUFFIX):
            continue
        step = read_object(path, _MOST_BYTES).get("step")
        if isinstance(step, int):
            return step
    return None


def read_best(run_dir: Path) -> dict[str, Any] | None:
    """The record of the kept LoRA: step, validation_loss, validation_data, file; None without one."""
    found = best_record(run_dir)
    # the file may have been moved away
    return found if found is not None and (run_dir / BEST_FOLDER / found["file"]).is_file() else None


def best_record(run_dir: Path) -> dict[str, Any] | None:
    """The content of best.json; None where it is missing or is not one of ours."""
    found = read_object(run_dir / BEST_FOLDER / BEST_RECORD, _MOST_BYTES)
    whole = all(isinstance(found.get(name), kind) for name, kind in _BEST_TYPES.items())
    return found if whole and Path(found["file"]).name == found["file"] else None


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Sub-folders named after steps, by step."""
    named = ((_STEP.fullmatch(path.name), path) for path in _here(folder))
    return sorted((int(name[1]), path) for name, path in named if name is not None and path.is_dir())


def _below(folder: Path) -> list[Path]:
    """Files at every depth of a folder; none of what is removed meanwhile."""

    def raised(error: OSError) -> None:
        if not isinstance(error, _PASSED_OVER):
            raise error

    walked = os.walk(folder, onerror=raised)
    return [Path(inside) / name for inside, _, names in walked for name in names]


def _here(folder: Path) -> list[Path]:
    """Files and folders right in a folder, by name; none of one that is removed meanwhile."""
    with contextlib.suppress(*_PASSED_OVER):
        return sorted(folder.iterdir())
    return []


def _tensors(folder: Path) -> list[Path]:
    """Files of weights right in a folder."""
    return [path for path in _here(folder) if path.suffix == ".safetensors"]


def _files(paths: Iterable[Path]) -> tuple[SavedFile, ...]:
    """The regular files among paths, links left out; one that vanishes meanwhile is left out too."""
    found = []
    for path in paths:
        try:
            if path.is_file() and not path.is_symlink():
                found.append(SavedFile(path, path.stat().st_size))
        except FileNotFoundError:
            continue
    return tuple(found)
