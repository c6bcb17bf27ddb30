"""Paths of a configuration that lie where they must not, or that no system can take."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import environment
from trainer.config.schema import RunConfig
from trainer.words.near import closest

if TYPE_CHECKING:
    from trainer.config.judging.found import Context, Found

_NAME_BYTES, _PATH_BYTES = 255, 4095
"""What Linux takes."""
_BESIDE_NAME, _BELOW_FOLDER = 64, 256
"""Bytes that files called as a run, while they are written, and paths below its folder are longer."""


def _image_folders(config: RunConfig) -> list[Path]:
    held_out = config.validation
    named: list[Path | tuple[Path, ...] | None] = [held_out.img_dir, held_out.control_dir]
    for one in config.data.sets:
        named += [one.img_dir, one.control_dir, one.mask_dir]
    folders = [named_one if isinstance(named_one, tuple) else (named_one,) for named_one in named]
    return [folder for group in folders for folder in group if folder is not None]


def _output_among_images(context: Context) -> Found:
    output, where = context.config.output_dir, context.source("output_dir")
    for folder in _image_folders(context.config):
        if _inside(output, folder):
            what = f"`output_dir` {output} lies in the image folder {folder}"
            yield where, what, "previews would become training data: write a folder outside it"


def _cache_among_images(context: Context) -> Found:
    cache = environment.cache_dir(context.config, context.environ)
    key = "data.cache_dir"
    where = context.source(key) if context.config.data.cache_dir is not None else "TRAINER_CACHE_DIR"
    for folder in _image_folders(context.config):
        if _inside(cache, folder):
            what = f"the cache {cache} lies in the image folder {folder}"
            yield where, what, f"write a folder outside it in `{key}` or TRAINER_CACHE_DIR"


def _output_in_model(context: Context) -> Found:
    output, model = context.config.output_dir, Path(context.config.model.pretrained_model_name_or_path)
    if is_dir(model) and _inside(output, model):
        what = f"`output_dir` {output} lies in the base model's folder {model}"
        yield context.source("output_dir"), what, "write a folder outside it"


def _folders_are_files(context: Context) -> Found:
    folders = {"output_dir": context.config.output_dir, "data.cache_dir": context.config.data.cache_dir}
    for key, folder in folders.items():
        if folder is not None and _is_file(folder):
            remedy = "write a folder; it is made if it does not exist"
            yield context.source(key), f"`{key}`: {folder} is a file", remedy


def _resume_word(context: Context) -> Found:
    key, resume = "checkpoint.resume_from_checkpoint", context.config.checkpoint.resume_from_checkpoint
    if isinstance(resume, str) or len(resume.parts) != 1 or is_dir(resume):
        return
    aliases = {"latest": "auto", "true": "auto", "yes": "auto", "false": "never", "no": "never"}
    meant = aliases.get(str(resume).lower()) or closest(str(resume), ("auto", "never"))
    remedy = f"did you mean `{meant}`?" if meant else "write auto, never, or the path of a checkpoint"
    yield context.source(key), f'`{key}`: "{resume}" is neither auto, never nor a folder', remedy


def _too_long(context: Context) -> Found:
    config = context.config
    cache, key = environment.cache_dir(config, context.environ), "data.cache_dir"
    resume = config.checkpoint.resume_from_checkpoint
    model = "model.pretrained_model_name_or_path"
    yield from _long("output_dir", config.output_dir, context.source("output_dir"), _BESIDE_NAME)
    yield from _long(key, cache, context.source(key) if config.data.cache_dir else "TRAINER_CACHE_DIR")
    yield from _long(model, Path(config.model.pretrained_model_name_or_path), context.source(model))
    for name, path in {
        "lora.init_from": config.lora.init_from,
        "checkpoint.resume_from_checkpoint": resume,
    }.items():
        if isinstance(path, Path):
            yield from _long(name, path, context.source(name))


def _long(key: str, path: Path, where: str, beside: int = 0) -> Iterator[tuple[str, str, str]]:
    """A problem where the path or a name in it is too long; the last name must leave `beside` bytes."""
    sizes = [_size(name) for name in path.parts]
    allowed = [*(_NAME_BYTES for _ in sizes[1:]), _NAME_BYTES - beside]
    for size, most in zip(sizes, allowed, strict=False):
        if size > most:
            what = f"`{key}` has a name of {size} bytes, and {most} are possible"
            yield where, what, "choose a shorter name"
            return
    whole, most = _size(str(path.absolute())), _PATH_BYTES - _BELOW_FOLDER
    if whole > most:
        what = f"`{key}` is a path of {whole} bytes, and {most} are possible"
        yield where, what, "choose a place with a shorter path"


def _size(name: str) -> int:
    return len(name.encode("utf-8", "surrogatepass"))


CHECKS: tuple[tuple[tuple[str, ...], Callable[[Context], Found]], ...] = (
    (
        (
            "output_dir",
            "data.cache_dir",
            "model.pretrained_model_name_or_path",
            "lora.init_from",
            "checkpoint.resume_from_checkpoint",
        ),
        _too_long,
    ),
    (("data.sets", "validation.img_dir", "output_dir"), _output_among_images),
    (("data.sets", "validation.img_dir", "data.cache_dir"), _cache_among_images),
    (("model.pretrained_model_name_or_path", "output_dir"), _output_in_model),
    (("output_dir", "data.cache_dir"), _folders_are_files),
    (("checkpoint.resume_from_checkpoint",), _resume_word),
)
"""Keys that a check looks at -> the check."""


def real(path: Path) -> str:
    return os.path.realpath(path)  # unlike Path.resolve, never raises


def _inside(path: Path, folder: Path) -> bool:
    """True if `path` is `folder` or lies below it; neither need exist."""
    return Path(real(path)).is_relative_to(real(folder))


def is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, or a folder that may not be entered
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False
