"""Paths that are typed in a form: relative ones lie below the studio's roots, and none leaves them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.config.reading.load import Loaded
from trainer.config.reading.paths import MODEL, paths_of
from trainer.errors import Problem
from trainer.ui import forms
from trainer.ui.studio import Studio

_ROOTS = {"output_dir": "runs", "lora.init_from": "runs", "checkpoint": "runs", "model": "models"}
"""Keys and sections whose paths lie below another root than that of data sets."""
_MOST_NAMED = 200
"""Folders that a field offers."""


def root_name(key: str) -> str:
    """The root that relative paths of a key lie below: `runs`, `models` or `data`."""
    return _ROOTS.get(key) or _ROOTS.get(key.partition(".")[0], "data")


def root_of(studio: Studio, key: str) -> Path:
    """The folder of `root_name`."""
    return {"runs": studio.runs, "models": studio.models, "data": studio.data}[root_name(key)]


def folders(studio: Studio) -> Mapping[str, tuple[str, ...]]:
    """Names of the folders right below the roots of base models and of data sets."""
    return {name: _names(root) for name, root in (("models", studio.models), ("data", studio.data))}


def _names(root: Path) -> tuple[str, ...]:
    if not os.access(root, os.R_OK | os.X_OK):
        return ()
    names = (one.name for one in root.iterdir() if one.is_dir() and not one.name.startswith("."))
    # a page spells other letters out, and what it offers has to be the name itself
    return tuple(sorted(name for name in names if name.isprintable())[:_MOST_NAMED])


def takes_folder(field: forms.Field) -> bool:
    """True for fields whose value may be a folder of base models or of pictures."""
    return field.key == MODEL or field.key.endswith((".img_dir", ".control_dir", ".mask_dir"))


def outside(studio: Studio, loaded: Loaded, trusted: str) -> Iterator[Problem]:
    """A problem for each path that leaves the studio's roots; those whose source begins with `trusted` may.
    Nothing is trusted where that is empty.

    A run's folder lies below the root of runs, all others below any of them.
    """
    roots = [root.resolve() for root in (studio.runs, studio.data, studio.models)]
    for key, path in paths_of(loaded.config):
        source = loaded.sources.get(key, "default")
        if source == "default" or source.startswith(("family ", "preset ", *filter(None, [trusted]))):
            continue
        resolved = path.expanduser().resolve()
        allowed = roots[:1] if key == "output_dir" else roots
        if not any(resolved.is_relative_to(root) and resolved != root for root in allowed):
            yield Problem(
                what=f"`{key}`: {path} is outside of the studio's folders",
                where=source,
                remedy=f"name a place below {root_of(studio, key)}",
            )
