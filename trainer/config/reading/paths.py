"""Paths in a configuration: all of them, relative ones taken from their own folder, and the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config import fields
from trainer.config.judging.path_rules import known
from trainer.config.reading.layers import Layer
from trainer.config.schema import RunConfig
from trainer.config.tree import KeyPath, Node
from trainer.ways import chat_templates

MODEL = "model.pretrained_model_name_or_path"
_TEXTS = (MODEL, "validation.clip_model", "validation.dinov2_model", chat_templates.KEY)
"""Keys whose text may be a path, or a name."""


def taken_from(layer: Layer, folder: Path | None) -> Layer:
    """A layer whose relative paths begin at `folder`, and not at this process's; None leaves it as it is.

    A text that may be a name is a path where it leads to something from there.
    """
    tree, problems = layer
    return (tree if tree is None or folder is None else begun_at(tree, folder, ())), problems


def begun_at(node: Node, folder: Path, path: KeyPath) -> Node:
    """The value of the key `path` with its relative paths taken from `folder`, as `taken_from` takes them."""
    value = node.value
    if isinstance(value, dict):
        return replace(node, value={key: begun_at(one, folder, (*path, key)) for key, one in value.items()})
    if isinstance(value, list):
        every = [begun_at(one, folder, (*path, str(place))) for place, one in enumerate(value)]
        return replace(node, value=every)
    if not isinstance(value, str) or not value.strip() or value.startswith(("/", "~")):
        return node
    return replace(node, value=str(folder / value)) if _leads(path, value, folder) else node


def _leads(path: KeyPath, value: str, folder: Path) -> bool:
    """True for a value that is a path from `folder` on."""
    if fields.takes(path, Path):
        return value not in fields.choices(path)
    return ".".join(path) in _TEXTS and known((folder / value).exists)


def place_of(key: str, text: str, folder: Path | None) -> Path | None:
    """The place that the value of a dotted key leads to, with links followed, where relative paths begin at
    `folder`; None for a value that is no path, for a relative one where that is not known, and for one that
    leads nowhere here: a home folder of nobody, a link that leads to itself.
    """
    path = Path(text)
    whole = path.is_absolute() or text.startswith("~")
    if text in ("", "null", "-") or not (whole or folder):
        return None
    begin = folder or Path("/")
    if not _leads(tuple(key.split(".")), text, begin):
        return None
    try:
        return (begin / path.expanduser()).resolve()
    except (RuntimeError, OSError):
        return None


def differences(configs: Sequence[Mapping[str, str]], folders: Sequence[Path | None]) -> dict[str, list[str]]:
    """Dotted keys in which configurations differ -> the text of each; `-` where one has none. Paths differ
    where the places do; relative ones of each begin at its one of `folders`.
    """
    found: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for config in configs for key in config):
        texts = [config.get(key, "-") for config in configs]
        places = (place_of(key, text, folder) for text, folder in zip(texts, folders, strict=True))
        if len({place or text for place, text in zip(places, texts, strict=True)}) > 1:
            found[key] = texts
    return found


def paths_of(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Every path of a configuration with its dotted key, that of a data set with the set's position; a text
    that may be a name is one where it is written like a path, or is a folder here.
    """
    yield from _paths(config.model_dump(), "")


def _paths(value: Any, key: str) -> Iterator[tuple[str, Path]]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _paths(one, f"{key}.{name}" if key else name)
    elif isinstance(value, tuple):
        for place, one in enumerate(value):
            yield from _paths(one, f"{key}.{place}" if isinstance(one, dict) else key)
    elif isinstance(value, Path):
        yield key, value
    elif isinstance(value, str) and key in _TEXTS and _is_path(value):
        yield key, Path(value)


def _is_path(text: str) -> bool:
    """True for a text that is no name: a repository's has one slash, and no dots for a part."""
    written = text.startswith(("/", "~")) or ".." in text.split("/") or text.endswith(chat_templates.SUFFIX)
    return written or known(Path(text).is_dir)
