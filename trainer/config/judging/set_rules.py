"""Sets of samples, trained on or held out, that contradict themselves or each other."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from trainer.config.judging.rule import Clash, Context, Rule
from trainer.config.schema import DataSet, RunConfig, ValidationSection

_MOST_VIEWS_TOGETHER = 64
_EXAMPLES = {"dataset_info": "FILE", "name": "NAME"}
KINDS = ("img_dir", "chat_file", "dataset_info")
"""Keys of a set of which one says where its samples are."""


def _training_sets(config: RunConfig) -> Iterator[tuple[str, Path, str]]:
    """Key and path of the samples of each set, and of a set in a list of sets its name there."""
    for index, one in enumerate(config.data.sets):
        kind = next((key for key in KINDS if vars(one)[key] is not None), None)
        if kind is not None:
            yield f"data.sets.{index}.{kind}", vars(one)[kind], one.name or ""


def _sets_of_nothing(context: Context) -> Iterator[Clash]:
    for index, one in enumerate(context.config.data.sets):
        if all(vars(one)[key] is None for key in KINDS):
            written = (name for name in context.sources if name.startswith(f"data.sets.{index}."))
            yield {"index": str(index), "where": context.blame(*written, "data.sets")}


def _sets_of_two_kinds(context: Context) -> Iterator[Clash]:
    for index, one in enumerate(context.config.data.sets):
        written = [key for key in KINDS if vars(one)[key] is not None]
        for other in written[1:]:
            key = f"data.sets.{index}.{other}"
            yield {"index": str(index), "key": key, "first": written[0], "other": other}


def _sets(config: RunConfig) -> Iterator[tuple[str, DataSet | ValidationSection]]:
    """Each training set, and what names the held-out samples, by the key above its own."""
    yield from ((f"data.sets.{index}", one) for index, one in enumerate(config.data.sets))
    yield "validation", config.validation


def _sets_of_half(context: Context) -> Iterator[Clash]:
    for above, one in _sets(context.config):
        if (one.dataset_info is None) != (one.name is None):
            there, absent = ("name", "dataset_info") if one.dataset_info is None else ("dataset_info", "name")
            why, remedy = f"has no effect without `{absent}`", f"add `{absent}: {_EXAMPLES[absent]}`"
            yield {"key": f"{above}.{there}", "why": why, "remedy": remedy}


def _bad_columns(context: Context) -> Iterator[Clash]:
    for above, one in _sets(context.config):
        if one.columns is None:
            continue
        names, why, remedy = list(one.columns.named), "", "remove one of them"
        if one.chat_file is None:
            why = "has no effect without `chat_file`"
            remedy = "remove it: dataset_info has columns of its own" if one.dataset_info else "remove it"
        elif "messages" in names and (
            others := [name for name in names if name not in ("messages", "system")]
        ):
            why = f"names messages and {', '.join(others)}: a record has either a list or single texts"
        elif "messages" not in names and not {"prompt", "response"} <= {*names}:
            why, remedy = "does not say where conversations are", "name messages, or prompt and response"
        if why:
            key = f"{above}.columns"
            where = context.blame(*(name for name in context.sources if name.startswith(f"{key}.")), key)
            yield {"key": key, "where": where, "why": why, "remedy": remedy}


def _same_set_twice(context: Context) -> Iterator[Clash]:
    seen: dict[tuple[str, str], str] = {}
    for key, path, name in _training_sets(context.config):
        first = seen.setdefault((os.path.realpath(path), name), key)
        if first != key:
            sets = [context.config.data.sets[int(one.split(".")[2])] for one in (first, key)]
            remedy = "remove it, and write `repeats: 2` in the other"
            if sets[0].columns != sets[1].columns:
                remedy = "name a copy of the file: one file has one layout"
            yield {"key": key, "path": str(path / name), "first": context.source(first), "remedy": remedy}


def _held_out(validation: ValidationSection) -> tuple[str, Path | None, str]:
    """Key and path of the samples for the validation loss, and of a set in a list of sets its name there."""
    kind = next((key for key in KINDS if vars(validation)[key] is not None), "img_dir")
    name = validation.name or "" if kind == "dataset_info" else ""
    return f"validation.{kind}", vars(validation)[kind], name


def _held_out_twice(context: Context) -> Iterator[Clash]:
    first, *others = [key for key in KINDS if vars(context.config.validation)[key] is not None] or [""]
    for other in others:
        yield {"key": f"validation.{other}", "first": f"validation.{first}"}


def _held_out_two_ways(context: Context) -> Iterator[Clash]:
    key, path, _ = _held_out(context.config.validation)
    if path is not None and context.config.validation.held_out:
        yield {"key": key}


def _held_out_trained(context: Context) -> Iterator[Clash]:
    key, held_out, entry = _held_out(context.config.validation)
    for trained, path, name in _training_sets(context.config):
        if held_out is None or entry != name:
            continue
        if os.path.realpath(held_out) == os.path.realpath(path):
            chats = not trained.endswith("img_dir")
            others = "file of other conversations" if chats else "folder of other images"
            yield {
                "key": key,
                "path": str(held_out / entry),
                "trained": context.source(trained),
                "others": others,
            }


def _many_views(context: Context) -> Iterator[Clash]:
    sets = context.config.data.sets
    counts = [max(1, one.random_crop) * (2 if one.flip else 1) for one in sets]
    if math.lcm(*counts) > _MOST_VIEWS_TOGETHER:
        key = next(f"data.sets.{index}.random_crop" for index, one in enumerate(sets) if one.random_crop)
        yield {"key": key, "counts": ", ".join(map(str, counts)), "longer": str(math.lcm(*counts))}


RULES: tuple[Rule[Context], ...] = (
    Rule(("data.sets",), _sets_of_nothing, "`data.sets.{index}.img_dir` is missing",
         "add `img_dir: DIR`, for a language model `chat_file: FILE`"),
    Rule(("data.sets",), _sets_of_two_kinds, "`data.sets.{index}` has both `{first}` and `{other}`",
         "make it two sets, or remove one of them"),
    Rule(("data.sets", "validation"), _sets_of_half, "`{key}` {why}", "{remedy}"),
    Rule(("data.sets", "validation"), _bad_columns, "`{key}` {why}", "{remedy}"),
    Rule(("validation",), _held_out_twice, "`{key}` and `{first}` both name held-out samples",
         "remove one of them"),
    Rule(("data.sets",), _same_set_twice, "`{key}`: {path} is a set already ({first})",
         "{remedy}"),
    Rule(("data.sets",), lambda at: all(one.is_reg for one in at.config.data.sets),
         "every one of `data.sets` is a regularisation set",
         "add the set to be learned, or leave is_reg out", at=("data.sets.0.is_reg",)),
    Rule(("validation.img_dir", "validation.held_out"), _held_out_two_ways,
         "`{key}` and {=validation.held_out} both say what is held out",
         "choose one: remove the other, or write `held_out: 0`"),
    Rule(("validation.img_dir", "data.sets"), _held_out_trained,
         "`{key}`: {path} is a training set ({trained})",
         "name a {others}, or write `held_out: 2` in its place to keep two of these out"),
    Rule(("data.sets",), _many_views,
         "sets with {counts} views an image: with their shares kept an epoch is {longer} times as long",
         "give the sets counts that divide one another: 2, 4, 8, 16"),
)  # fmt: skip
