"""Paths of a configuration that lie where they must not, or that no system can take."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.config import environment
from trainer.config.judging.rule import Clash, Context, Rule
from trainer.ways import chat_templates
from trainer.words.near import closest, did_you_mean

_NAME_BYTES, _PATH_BYTES = 255, 4095
"""The longest name and path, in bytes, that Linux takes."""
_BESIDE_NAME, _BELOW_FOLDER = 64, 256
"""Bytes that files called as a run, while they are written, and paths below its folder are longer."""
_RESUME_WORDS = {"latest": "auto", "true": "auto", "yes": "auto", "false": "never", "no": "never"}
_MODEL = "model.pretrained_model_name_or_path"
_RESUME = "checkpoint.resume_from_checkpoint"


def known(is_kind: Callable[[], bool]) -> bool:
    """The answer of a path's `is_dir` or `is_file`; False where nobody can tell."""
    try:
        return is_kind()
    except OSError:  # a name that is too long, or a folder that may not be entered
        return False


def _inside(path: Path, folder: Path) -> bool:
    """True if `path` is `folder` or lies below it; neither need exist."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))  # Path.resolve may raise


def _image_folders(context: Context, path: Path) -> Iterator[str]:
    """The folders of images that `path` lies in."""
    held_out = context.config.validation
    named: list[Path | tuple[Path, ...] | None] = [held_out.img_dir, held_out.control_dir]
    for one in context.config.data.sets:
        named += [one.img_dir, one.control_dir, one.mask_dir]
    for folders in named:
        for folder in folders if isinstance(folders, tuple) else (folders,):
            if folder is not None and _inside(path, folder):
                yield str(folder)


def _cache(context: Context) -> tuple[Path, str]:
    """The folder of the cache, and where it was written."""
    written = context.config.data.cache_dir is not None
    where = context.source("data.cache_dir") if written else "TRAINER_CACHE_DIR"
    return environment.cache_dir(context.config, context.environ), where


def _output_among_images(context: Context) -> Iterator[Clash]:
    return ({"folder": folder} for folder in _image_folders(context, context.config.output_dir))


def _cache_among_images(context: Context) -> Iterator[Clash]:
    cache, where = _cache(context)
    found = _image_folders(context, cache)
    return ({"cache": str(cache), "folder": folder, "where": where} for folder in found)


def _output_in_model(context: Context) -> Iterator[Clash]:
    model = Path(context.config.model.pretrained_model_name_or_path)
    if known(model.is_dir) and _inside(context.config.output_dir, model):
        yield {"folder": str(model)}


def _folders_are_files(context: Context) -> Iterator[Clash]:
    folders = {"output_dir": context.config.output_dir, "data.cache_dir": context.config.data.cache_dir}
    for key, folder in folders.items():
        if folder is not None and known(folder.is_file):
            yield {"key": key, "folder": str(folder)}


def _resume_word(context: Context) -> Iterator[Clash]:
    resume = context.config.checkpoint.resume_from_checkpoint
    if not isinstance(resume, str) and len(resume.parts) == 1 and not known(resume.is_dir):
        meant = _RESUME_WORDS.get(str(resume).lower()) or closest(str(resume), ("auto", "never"))
        remedy = f"did you mean `{meant}`?" if meant else "write auto, never, or the path of a checkpoint"
        yield {"remedy": remedy}


def _no_template(context: Context) -> Iterator[Clash]:
    value, names = context.config.data.chat_template, (chat_templates.AUTO, *chat_templates.names())
    if value in names or (value.endswith(chat_templates.SUFFIX) and known(Path(value).is_file)):
        return
    is_file = value.endswith(chat_templates.SUFFIX)
    what = "is no file" if is_file else f"is neither {', '.join(names)} nor a {chat_templates.SUFFIX} file"
    hint = "" if is_file else did_you_mean(value, names)
    ours = f"write {', '.join(names)}" if is_file else "name one of them"
    yield {"what": what, "remedy": f"{hint}{ours}, or a FILE{chat_templates.SUFFIX} of your own"}


def _paths(context: Context) -> Iterator[tuple[str, Path, str, int]]:
    """Key, path and place of every path of ours, and the bytes to be left beside its last name."""
    config = context.config
    yield "output_dir", config.output_dir, context.source("output_dir"), _BESIDE_NAME
    yield "data.cache_dir", *_cache(context), 0
    model, resume = Path(config.model.pretrained_model_name_or_path), config.checkpoint.resume_from_checkpoint
    for key, path in ((_MODEL, model), ("lora.init_from", config.lora.init_from), (_RESUME, resume)):
        if isinstance(path, Path):
            yield key, path, context.source(key), 0


def _too_long(context: Context) -> Iterator[Clash]:
    """One clash for each path with a name that is too long, or that is too long as a whole."""
    for key, path, where, beside in _paths(context):
        limits = (*(_NAME_BYTES for _ in path.parts[1:]), _NAME_BYTES - beside)
        texts = [("has a name", "shorter name", *pair) for pair in zip(path.parts, limits, strict=False)]
        whole = _PATH_BYTES - _BELOW_FOLDER
        texts.append(("is a path", "place with a shorter path", str(path.absolute()), whole))
        for is_long, other, text, most in texts:
            size = len(text.encode("utf-8", "surrogatepass"))
            if size > most:
                told = {"is": f"{is_long} of {size} bytes", "most": str(most), "other": other}
                yield {"key": key, "where": where, **told}
                break


RULES: tuple[Rule[Context], ...] = (
    Rule(("output_dir", "data.cache_dir", _MODEL, "lora.init_from", _RESUME), _too_long,
         "`{key}` {is}, and {most} are possible", "choose a {other}"),
    Rule(("output_dir", "data.sets", "validation.img_dir"), _output_among_images,
         "`output_dir` {output_dir} lies in the image folder {folder}",
         "previews would become training data: write a folder outside it", at=("output_dir",)),
    Rule(("data.sets", "validation.img_dir", "data.cache_dir"), _cache_among_images,
         "the cache {cache} lies in the image folder {folder}",
         "write a folder outside it in `data.cache_dir` or TRAINER_CACHE_DIR"),
    Rule(("output_dir", _MODEL), _output_in_model,
         "`output_dir` {output_dir} lies in the base model's folder {folder}", "write a folder outside it",
         at=("output_dir",)),
    Rule(("output_dir", "data.cache_dir"), _folders_are_files,
         "`{key}`: {folder} is a file", "write a folder; it is made if it does not exist"),
    Rule((chat_templates.KEY,), _no_template,
         "`data.chat_template`: {data.chat_template} {what}", "{remedy}"),
    Rule((_RESUME,), _resume_word,
         "`checkpoint.resume_from_checkpoint`: \"{checkpoint.resume_from_checkpoint}\" is neither auto, never"
         " nor a folder", "{remedy}"),
)  # fmt: skip
