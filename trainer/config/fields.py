"""The schema in words: what a key takes, what is beside it, what a misspelling may have meant."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config import elsewhere
from trainer.config.schema import DataSet, RunConfig
from trainer.config.tree import KeyPath
from trainer.words.near import closest

_OF_ALPACA = {
    "instruction": "prompt",
    "input": "query",
    "output": "response",
    "conversations": "messages",
}
"""Parts of a record, in `columns`, by the keys that alpaca and ShareGPT have for them."""


def section_of(annotation: object) -> type[BaseModel] | None:
    """The section class that an annotation is, or is beside None; else None."""
    if isinstance(annotation, types.UnionType):
        options = [option for option in get_args(annotation) if option is not type(None)]
        annotation = options[0] if len(options) == 1 else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def field_at(path: KeyPath) -> FieldInfo | None:
    """The schema's field at `path`; positions of a list and keys of a mapping lead to what it holds. None if
    there is none.
    """
    section: type[BaseModel] | None = RunConfig
    field: FieldInfo | None = None
    for key in path:
        if section is not None:
            field = section.model_fields.get(key)
        elif field is not None:
            item = _item(field.annotation, key)
            field = None if item is None else FieldInfo.from_annotation(item)
        if field is None:
            return None
        section = section_of(field.annotation)
    return field


def is_section(path: KeyPath) -> bool:
    """True for `model`, `data`, ... but not for an item of a list."""
    field = field_at(path)
    return field is not None and section_of(field.annotation) is not None and not path[-1].isdecimal()


def takes(path: KeyPath, kind: type) -> bool:
    """True if the value at `path` may be a `kind` (tuple for a list)."""
    return any((get_origin(option) or option) is kind for option, _ in _options_at(path))


@cache
def dotted_keys() -> tuple[str, ...]:
    """Every key of the schema outside lists, in its order: `family`, `model.revision`, ..."""
    keys: list[str] = []
    for name, field in RunConfig.model_fields.items():
        section = section_of(field.annotation)
        keys += [name] if section is None else [f"{name}.{key}" for key in section.model_fields]
    return tuple(keys)


def expected(path: KeyPath) -> str:
    """The values that `path` takes, in words: "a whole number of at least 1", "auto, true or false"."""
    flat = [word for option, metadata in _options_at(path) for word in _words(option, metadata)]
    return flat[0] if len(flat) == 1 else f"{', '.join(flat[:-1])} or {flat[-1]}"


def choices(path: KeyPath) -> list[str]:
    """The fixed words that may stand at `path`."""
    literals = (option for option, _ in _options_at(path) if get_origin(option) is Literal)
    return [str(word) for option in literals for word in get_args(option)]


def joined(word: str) -> str:
    """The dotted key that `word` is with `_` for its dot, such as `train_seed`; empty where it is none."""
    return next((name for name in dotted_keys() if "." in name and word == name.replace(".", "_")), "")


def suggest_key(path: KeyPath) -> str:
    """Remedy for an unknown key: what may have been meant, else what exists beside it."""
    key, field = path[-1].lower().replace("-", "_"), field_at(path[:-1])
    parent = RunConfig if field is None else section_of(field.annotation)
    siblings = () if parent is None else tuple(parent.model_fields)
    # `img_dir` of a set, for instance
    misplaced = dict.fromkeys(DataSet.model_fields, "data.sets")
    everywhere = {name.rpartition(".")[2]: name for name in reversed(dotted_keys())} | misplaced
    del everywhere["name"]  # mostly another trainer's for the run's
    if path[-1] in dotted_keys():
        section, _, leaf = path[-1].partition(".")
        if not leaf:
            return f"write it outside of all sections, as `{section}: ...` at the beginning of a line"
        return f"nest it: `{section}:` on one line, `  {leaf}: ...` indented below it"
    if key in siblings:
        return f"write `{key}`"
    if path[-2:-1] == ("columns",):
        # parts of a record: another section's key, such as `output_dir`, is never meant
        meant = _OF_ALPACA.get(key) or closest(key, siblings)
        return f"did you mean `{meant}`?" if meant else f"known here: {', '.join(siblings)}"
    if key in everywhere:
        return f"did you mean `{everywhere[key]}`?"
    foreign = elsewhere.key(key)
    if foreign is not None:
        return foreign.remedy
    if len(path) == 1 and (whole := joined(key)):
        return f"did you mean `{whole}`?"
    near = closest(key, siblings)
    if near is not None:
        return f"did you mean `{near}`?"
    far = closest(key, list(everywhere), cutoff=0.8)
    if far is not None:
        return f"did you mean `{everywhere[far]}`?"
    return f"known here: {', '.join(siblings)}"


def option_meant(word: str) -> str:
    """Remedy for an option of another trainer's command line: the key that it is; empty where it is none."""
    word = word.lower().replace("-", "_")
    if word in ("img_dir", "chat_file"):
        return f"pass --dataset PATH, or write `{word}` in a set of data.sets, in the file"
    if word in DataSet.model_fields and word != "name":  # mostly another trainer's for the run's
        return f"write `{word}` in a set of data.sets, in the file"
    row = elsewhere.key(word)
    ours = next((name for name in dotted_keys() if word in (name, name.rpartition(".")[2])), "")
    if row is not None and not row.ours:
        return row.remedy
    note = f" ({row.note})" if row is not None and row.note else ""
    key = ours if row is None else row.ours
    return f"keys are set in the file, or by --set {key}=...{note}" if key else ""


def _item(annotation: object, key: str) -> Any:
    """Type of what a list or a mapping holds at `key`; None where it cannot hold one there."""
    place = {tuple: 0, dict: 1}
    kinds = [option for option, _ in _options(annotation, ()) if get_origin(option) in place]
    held = {get_origin(option): get_args(option)[place[get_origin(option)]] for option in kinds}
    return held.get(tuple if key.isdecimal() and tuple in held else dict)


def _options_at(path: KeyPath) -> list[tuple[Any, tuple[object, ...]]]:
    """The alternatives of what may stand at `path`; none where the schema has no such key."""
    field = field_at(path)
    return [] if field is None else list(_options(field.annotation, field.metadata))


def _options(annotation: object, metadata: Sequence[object]) -> Iterator[tuple[Any, tuple[object, ...]]]:
    """The alternatives of an annotation without unions and `Annotated`, each with its constraints."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        for entry in more:
            metadata = [*metadata, *(entry.metadata if isinstance(entry, FieldInfo) else [entry])]
        yield from _options(inner, metadata)
    elif origin in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _options(option, metadata)
    else:
        yield annotation, tuple(metadata)


def _words(option: Any, metadata: Sequence[object]) -> list[str]:
    if get_origin(option) is Literal:
        return [str(word) for word in get_args(option)]
    if option is bool:
        return ["true", "false"]
    if option is type(None):
        return ["null"]
    if option in (int, float):
        return [("a whole number" if option is int else "a number") + _bounds(metadata)]
    if get_origin(option) is tuple:
        least = any(isinstance(item, annotated_types.MinLen) for item in metadata)
        return ["a list with at least one item" if least else "a list"]
    if section_of(option) is not None:
        return [f"keys ({', '.join(option.model_fields)})"]
    told = [item for item in metadata if isinstance(item, str)]
    return told or ["a path" if option is Path else "a text that is not empty"]


def _bounds(metadata: Sequence[object]) -> str:
    low = high = ""
    for item in metadata:
        if isinstance(item, annotated_types.Ge):
            low = f"of at least {item.ge}"
        elif isinstance(item, annotated_types.Gt):
            low = f"above {item.gt}"
        elif isinstance(item, annotated_types.Le):
            high = f"at most {item.le}"
        elif isinstance(item, annotated_types.Lt):
            high = f"below {item.lt}"
    return " " + " and ".join(filter(None, (low, high))) if low or high else ""
