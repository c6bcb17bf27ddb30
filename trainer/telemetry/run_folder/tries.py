"""Tries of a run: pictures of some prompts without its LoRA and with it, each try in `tries/N`. No torch.

They lie in the run's folder and not in that of the queue's job: they belong to the LoRA that they show, and
stay when the job is taken off the list.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from trainer.config.judging.rules import unused_keys
from trainer.config.reading.load import Loaded, with_settings
from trainer.config.schema import changed
from trainer.config.secrets import redacted
from trainer.errors import DataError, Problem

FOLDER = "tries"
RECORD = "try.json"
MOST_PROMPTS = MOST_LORAS = 4
MOST_STRENGTH = 1.5
MOST_CHARACTERS = 10_000
"""Longest text of a prompt."""
_MOST_BYTES = 1 << 20
LEAST_SIDE, MOST_SIDE = 32, 4096
"""Sides of a picture in pixels."""
_Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]
_Prompt = Annotated[str, Field(max_length=MOST_CHARACTERS, pattern=r"\S")]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, kw_only=True)
class Try:
    """One try: a column of pictures without a LoRA, and one with each LoRA file."""

    prompts: Annotated[tuple[_Prompt, ...], Field(min_length=1, max_length=MOST_PROMPTS)]
    loras: Annotated[tuple[_Text, ...], Field(min_length=1, max_length=MOST_LORAS)]
    """LoRA files, as paths from the run's folder."""
    labels: Annotated[tuple[_Text, ...], Field(max_length=MOST_LORAS)] = ()
    """Times of these files in the run (`final`, `step 250`), one each; empty where nobody noted them."""
    strength: Annotated[float, Field(ge=0, le=MOST_STRENGTH)] = 1.0
    """Factor of the LoRA's change of the weights; 1 is the LoRA as it was trained."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the first prompt in every column; the number of a prompt is added."""
    negative_prompt: _Text = ""
    resolution: Annotated[int, Field(ge=LEAST_SIDE, le=MOST_SIDE)] | None = None
    """Side of the pictures in pixels; the run's own when None, as of the next."""
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    """Denoising steps of a picture."""

    @property
    def pictures(self) -> int:
        """Pictures, or answers, in all."""
        return len(self.prompts) * (1 + len(self.loras))


def to_json(one: Try) -> str:
    """The record of a try. Raises DataError for a text with what looks like a secret: a record must not keep
    it, and without it another text would be drawn.
    """
    for text in (*one.prompts, one.negative_prompt):
        if (shown := redacted(text)) != text:
            remedy = "write the prompt without it"
            raise DataError(f"{shown[:80]!r} has a password or a token in it", where="prompt", remedy=remedy)
    return json.dumps(asdict(one), indent=1, ensure_ascii=False) + "\n"


def read_record(folder: Path) -> Try:
    """The try in `folder`. Raises DataError as `read_try`, and where there is no record."""
    path = folder / RECORD
    try:
        with path.open("rb") as file:
            return read_try(file, str(path))
    except OSError as error:
        what = f"it cannot be read: {error.strerror}"
        raise DataError(what, where=str(path), remedy="name the folder of a try, RUN/tries/N") from error


def read_try(file: BinaryIO, where: str) -> Try:
    """The try of a record that is open. Raises DataError with everything that is wrong with it."""
    try:
        found = TypeAdapter(Try).validate_json(file.read(_MOST_BYTES), strict=True)
    except ValidationError as error:
        raise DataError(
            [
                Problem(what=f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}", where=where)
                for one in error.errors(include_url=False)
            ]
        ) from error
    outside = [name for name in found.loras if not _is_inside(name)]
    if outside:
        what = f"{outside[0]!r} is no LoRA file inside the run's folder"
        raise DataError(what, where=where, remedy="write paths from there: lora/NAME.safetensors")
    if found.labels and len(found.labels) != len(found.loras):
        what = f"{len(found.labels)} labels for {len(found.loras)} LoRA files"
        raise DataError(what, where=where, remedy="write one for each file, or none")
    return found


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.suffix == ".safetensors"


def run_of(folder: Path) -> Path:
    """The run's folder of the try in `folder`."""
    return folder.parents[1]


def picture(folder: Path, column: int, row: int) -> Path:
    """The picture of a prompt, its row from 0; column 0 is without a LoRA, 1 with the first. An answer's text
    lies beside it.
    """
    return folder / str(column) / f"{row:02d}.png"


def with_try(loaded: Loaded, one: Try) -> Loaded:
    """A run's configuration for one process that draws a try.

    Of a family that edits, the pictures that the run's prompts edit are edited in turn. Raises ConfigError
    where the configuration is refused so.
    """
    named: Sequence[Any] = loaded.config.validation.control_images
    edited = tuple(named[row % len(named)] for row in range(len(one.prompts))) if named else None
    values: Mapping[str, Any] = {
        "prompts": one.prompts,
        "seed": one.seed,
        "resolution": one.resolution,
        "num_inference_steps": one.num_inference_steps,
        "control_images": edited,
    }
    validation = {f"validation.{key}": value for key, value in values.items() if value is not None}
    alone = {"validation.metrics": (), "validation.early_stop": None, "parallel.gpus": 1}
    # metrics and early stopping ask for more prompts than a try has; what belongs to them alone, or to
    # several GPUs, is as if nobody had written it
    given = {**validation, **alone, "parallel.shard": "none"}
    unused = unused_keys(changed(loaded.config, given))
    written = {key: source for key, source in loaded.sources.items() if key not in unused}
    return with_settings(dataclasses.replace(loaded, sources=written), given)
