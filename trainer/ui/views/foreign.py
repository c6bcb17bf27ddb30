"""Another trainer's configuration, translated by name: what each of its keys is here."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from trainer.config import elsewhere, fields
from trainer.config.reading.paths import MODEL
from trainer.doctor.entries import TRAINING, Document, Entry
from trainer.doctor.reading import of_text
from trainer.errors import ConfigError, Problem
from trainer.ui.forms import SOURCE
from trainer.ui.studio import Studio
from trainer.ui.views.asked import OWN, Asked, form_of, problems_of, start_with, starts

_FILE_OF = {"{": "configuration.json"} | dict.fromkeys(("#!", "accelerate ", "python ", "python3 "), "run.sh")
"""Names that tell the kind of a text by its beginning."""
_OF_A_SET = re.compile(r"`(\w+)` of a set|\{(\w+): ")
_MOST_KEYS = 500
"""Keys that are looked at: each value is tried in our field."""
_OF_TREES = (*TRAINING, "unknown")


@dataclass(frozen=True, kw_only=True)
class Translated:
    """One key of another trainer."""

    name: str
    """Dotted, as it stands there."""
    value: str
    """The value there; where it was taken, as it was typed here."""
    ours: str
    """Our key; empty where there is none."""
    note: str
    """The difference, or why there is none, or why the value was not taken over."""
    taken: bool
    """Whether the value was typed in our key's field."""


def brought(studio: Studio, asked: Asked, text: str) -> tuple[Asked, tuple[Translated, ...]]:
    """The form with a configuration that somebody pasted, and what became of each of its keys.

    One of this trainer is what the run starts from; another's is typed in by name, over the shipped one for
    the same base model. Raises ConfigError for a text that cannot be read, or that has no keys.
    """
    documents = _documents(text)
    if any(document.kind == "ours" for document in documents):
        return replace(asked, start=OWN, own=text, typed={}), ()
    entries = list(itertools.islice(_entries(documents), _MOST_KEYS))
    models = [entry.value for entry in entries if _ours(entry)[0] == MODEL]
    start = next((found for one in models if (found := start_with(one))), asked.start)
    asked = replace(asked, start=start if start in starts() else Asked().start, own="", typed={})
    rows = translated(entries, lambda key, value: accepted(studio, asked, key, value))
    return replace(asked, typed={row.ours: row.value for row in rows if row.taken}), rows


def translated(
    entries: Iterable[Entry], accepts: Callable[[str, str], str | Problem]
) -> tuple[Translated, ...]:
    """Every key of a configuration, in its order.

    `accepts` gives the text to type in the field of our key, or what is wrong with a value there. Of several
    values for one key the first that it accepts is taken.
    """
    found, taken = list[Translated](), set[str]()
    for entry in entries:
        (ours, note), value, takes = _ours(entry), entry.value, False
        if ours in taken:
            note = f"another value was taken; {note}" if note else "another value was taken"
        elif ours and value:
            answer = accepts(ours, value)
            takes = isinstance(answer, str)
            if isinstance(answer, str):
                value = answer
            else:
                note = f"{answer.what}; {note}" if note else answer.what
        taken |= {ours} if takes else set()
        name = ".".join(entry.path)
        found.append(Translated(name=name, value=value, ours=ours, note=note, taken=takes))
    return tuple(found)


def accepted(studio: Studio, asked: Asked, key: str, value: str) -> str | Problem:
    """The text to type for a value of another trainer in the field `key`, or why it is none."""
    field = next((one for section in form_of(1) for one in section.fields if one.key == key), None)
    if field is None:
        return Problem(what=f"`{key}` is a section, and this is a value")
    if value in ("true", "false") and value not in field.words:
        return Problem(what=f"it is a switch there, and `{key}` takes {field.takes} here")
    letters = re.sub(r"[^a-z0-9]", "", value.lower())
    text = next((word for word in field.words if re.sub(r"[^a-z0-9]", "", word) == letters), value)
    wrong = problems_of(studio, replace(asked, typed={key: text}))
    return next((one for one in wrong if key in (one.where.removeprefix(SOURCE), *one.what.split("`"))), text)


def _entries(documents: Iterable[Document]) -> Iterator[Entry]:
    """Keys with values; of a list of plain values the list's key, with the first value."""
    seen = set[tuple[str, ...]]()
    for document in documents:
        for entry in document.entries if document.kind in _OF_TREES else ():
            path = entry.path
            while path and path[-1].isdecimal():
                path = path[:-1]
            if not entry.section and path and path not in seen:
                seen.add(path)
                yield Entry(path=path, value=entry.value)


def _ours(entry: Entry) -> tuple[str, str]:
    """Our key for an entry, and a note on it."""
    row = elsewhere.key(entry.name)
    if row is not None:
        in_set = _OF_A_SET.search(row.note) if row.ours == "data.sets" else None
        return (f"data.sets.0.{in_set[1] or in_set[2]}" if in_set else row.ours), row.note
    plain = entry.name.lower().replace("-", "_")
    same = [key for key in fields.dotted_keys() if plain == key.rpartition(".")[2]]
    if same:
        return same[0], "the same name here"
    return "", "nothing here has this name"


def _documents(text: str) -> tuple[Document, ...]:
    name = next(
        (name for begin, name in _FILE_OF.items() if text.lstrip().startswith(begin)), "configuration"
    )
    read = of_text(PurePath(name), text)
    if not any(document.kind in (*_OF_TREES, "ours") and document.entries for document in read.documents):
        read_as_toml = tuple(_toml(text))
        if read_as_toml:
            return (Document(kind="unknown", place=name, entries=read_as_toml),)
        remedy = "paste YAML, JSON, TOML, or the command that starts the training"
        raise ConfigError(read.problems or [Problem(what="no keys were found in it", remedy=remedy)])
    return read.documents


def _toml(text: str) -> Iterator[Entry]:
    """Entries of TOML; none where it is none."""
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return
    yield from _below(content, ())


def _below(value: Any, path: tuple[str, ...]) -> Iterator[Entry]:
    if isinstance(value, Mapping | list):
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _below(one, (*path, str(key)))
    else:
        yield Entry(path=path, value=str(value).lower() if isinstance(value, bool) else str(value))
