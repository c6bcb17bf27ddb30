"""Other trainers' names of keys, files and environment variables, and the names that ours have.

The rows are data, in elsewhere.yaml beside this file, and are read when they are first asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trainer.config import environment

R = TypeVar("R", "Row", "Foreign")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Spellings that mean one thing: `ours` is a dotted key or a file, empty where there is none."""

    names: tuple[str, ...]
    ours: str = ""
    note: str = ""
    """The difference, or why there is none."""

    @property
    def remedy(self) -> str:
        """The remedy of an error message."""
        if not self.ours:
            return f"there is none here, leave it out: {self.note}"
        return f"did you mean `{self.ours}`?" + (f" {self.note}" if self.note else "")


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Environment variables that do nothing here, or harm."""

    names: tuple[str, ...]
    """Regular expressions over whole names."""
    says: str
    remedy: str
    value: str = r".*\S.*"
    """A regular expression over whole values."""
    is_error: bool = False
    unless: str = ""
    """Name of a variable beside which they are right."""


def key(name: str) -> Row | None:
    """Our key for another trainer's; hyphens and capitals do not count."""
    plain = name.lower().lstrip("-").replace("-", "_")
    return next((row for rows in keys().values() for row in rows if plain in row.names), None)


def file(name: str) -> Row | None:
    """Our file for another trainer's, by its name without folders."""
    plain = name.lower().replace("-", "_").removesuffix(".yml").removesuffix(".yaml")
    return next(
        (row for row in files() for one in row.names if one.removesuffix(".yaml").replace("-", "_") == plain),
        None,
    )


def variables(environ: Mapping[str, str]) -> Iterator[tuple[str, Foreign]]:
    """Name and row of each variable that is set and does nothing, or harm."""
    ours = {variable.name for variable in environment.VARIABLES}
    for name in sorted(environ):
        for row in foreign():
            # a variable of ours is meant by its own name, never by a pattern that happens to cover it
            covered = name in row.names if name in ours else re.fullmatch("|".join(row.names), name)
            right = row.unless and environ.get(row.unless)
            if covered and not right and re.fullmatch(row.value, environ[name], re.DOTALL):
                yield name, row


@cache
def keys() -> Mapping[str, tuple[Row, ...]]:
    """Other trainers' keys by topic."""
    topics = _document(1)["keys"].items()
    return {topic: tuple(_made(Row, row) for row in rows) for topic, rows in topics}


@cache
def files() -> tuple[Row, ...]:
    """Other trainers' files."""
    return tuple(_made(Row, row) for row in _document(1)["files"])


@cache
def foreign() -> tuple[Foreign, ...]:
    """Variables without a use here."""
    return tuple(_made(Foreign, row) for row in _document(0))


def _made(kind: type[R], row: Mapping[str, Any]) -> R:
    lists: dict[str, Any] = {key: tuple(row[key].split()) for key in ("names",)}
    return kind(**{**row, **lists})


@cache
def _document(number: int) -> Any:
    """One document of elsewhere.yaml: those behind it are not read."""
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    with Path(__file__).with_suffix(".yaml").open(encoding="utf-8") as rows:
        return next(islice(yaml.load_all(rows, loader), number, None))
