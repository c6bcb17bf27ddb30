"""The place of a run's base model on this disk, and the files of it that are missing. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import AccessError, ConfigError, Problem
from trainer.files.weight_files import State, to_replace, weight_files
from trainer.modeling.base import hub

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
WEIGHT_FILE = "*.safetensors"
# components that read text, and the files one of which has the words
_READERS = ("tokenizer", "processor")
# components without weights, each with a config of its own name
_SUPPORT = (*_READERS, "scheduler")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model")
_PICKLED_FILES = ("*.bin", "*.pt", "*.ckpt", "*.msgpack")


def local_folder(config: RunConfig) -> Path | None:
    """The base model's folder as far as it is on this disk already; None for a repository that is not.

    Asks nobody and checks nothing inside. Raises ConfigError for a path that does not exist, AccessError for
    one that this user may not enter.
    """
    name = config.model.pretrained_model_name_or_path
    path = Path(name)
    with hub.refusal_told(path):
        if path.is_dir():
            (path / "config.json").exists()  # a question that is refused where it may not be entered
            return path
    if not hub.is_repository_id(name):
        raise ConfigError(
            f"the base model's folder {name} does not exist",
            where=hub.KEY,
            remedy="name a folder in diffusers' or transformers' layout, or a hub repository (OWNER/NAME)",
        )
    # a language model's folder has a config.json in place of the index of its parts
    folder = hub.cached(name, config.model.revision)
    indexes = ("model_index.json", "config.json")
    if folder is None:
        return None
    with hub.refusal_told(folder):
        return folder if any((folder / index).is_file() for index in indexes) else None


@dataclass(frozen=True, kw_only=True)
class Base:
    """The state of a run's base model on this disk."""

    folder: Path | None
    """The model's folder; None where it is absent."""
    missing: tuple[tuple[Path, str], ...]
    """Obstacles to loading its components, as (path, what is wrong)."""
    built: frozenset[str]
    """Components that `model.weights` has built from their config.json, and whose files do not count."""

    @property
    def state(self) -> State:
        """`partial`: an interrupted download, or a folder that lacks files."""
        if self.folder is None:
            return "absent"
        return "partial" if self.missing else "complete"

    @property
    def missing_line(self) -> str:
        """The first obstacle in words with its place, and the number of others; empty where there is none."""
        if self.folder is None:
            return "nothing of it is on this disk yet"
        if not self.missing:
            return ""
        path, what = self.missing[0]
        place = "" if path == self.folder else f"{path.relative_to(self.folder)}: "
        more = f", and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
        return place + what + more


def base_at(folder: Path | None, config: RunConfig, components: Sequence[str], *, trained: str) -> Base:
    """The state of the base model whose `local_folder` is `folder`. Asks no network.

    The one answer for planner, loader, fetch and preflight. Raises AccessError for an index that cannot be
    read, and for folders and files that this user may not read.
    """
    if folder is None:
        return Base(folder=None, missing=(), built=frozenset())
    require_readable(folder, components)
    built = frozenset[str]()
    with hub.refusal_told(folder):
        if config.model.weights == "random":
            bare = {
                name
                for name in components
                if (folder / name / "config.json").exists() and weight_files(folder / name).state == "absent"
            }
            built = frozenset({trained} | bare)
        return Base(folder=folder, missing=tuple(_missing(folder, components, built)), built=built)


def require_readable(folder: Path, components: Sequence[str]) -> None:
    """Raise AccessError for what this user may not read of the components."""
    closed = _closed(folder) or [path for name in components for path in _closed(folder / name)]
    if closed:
        remedy = "let this user read the base model's folders and files, or name another copy of it"
        problems = [Problem(what="this user may not read it", where=str(path)) for path in closed]
        raise AccessError([*problems[:-1], dataclasses.replace(problems[-1], remedy=remedy)])


def _closed(folder: Path) -> list[Path]:
    """The folder, or files in it, that are there and may not be read."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return [folder] if os.access(folder, os.F_OK) else []
    files = (file for kind in (*CONFIG_FILES, WEIGHT_FILE) for file in folder.glob(kind))
    return sorted(file for file in files if os.access(file, os.F_OK) and not os.access(file, os.R_OK))


def is_repository(config: RunConfig) -> bool:
    """Whether the base model is named as a repository of the hub, so that missing files can be downloaded."""
    name = config.model.pretrained_model_name_or_path
    try:
        return not Path(name).is_dir()
    except PermissionError:  # of a folder in one that this user may not enter: `local_folder` says so
        return hub.is_repository_id(name)


def can_download(config: RunConfig) -> bool:
    """Whether neither configuration nor environment forbids asking the hub for the base model."""
    return is_repository(config) and config.model.download != "never" and not hub.is_offline()


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of a language model's folder that belong to its tokenizer and to generation."""
    found = component_texts(folder)
    return [path for path in found if path.name != "config.json" and not path.name.endswith(".index.json")]


def _missing(folder: Path, components: Sequence[str], built: Collection[str]) -> list[tuple[Path, str]]:
    """Obstacles to loading the components, as (path, what is wrong); those in `built` need no weights."""
    found: list[tuple[Path, str]] = []
    for component in components:
        path = folder / component
        has_weights = (path / "config.json").exists()
        # a link whose blob is not there does not exist
        dead = [file for file in component_texts(path) if not file.exists()]
        if not path.is_dir():
            found.append((path, f"the base model has no component {component!r}"))
        elif dead:
            found.append((dead[0], "a link to a file that is gone"))
        elif not is_configured(folder, component):
            found.append((path, "no config file" if component.startswith(_SUPPORT) else "no config.json"))
        # without its words transformers opens a tokenizer all the same, and it knows none
        elif component.startswith(_READERS) and not any(
            file.exists() for kind in _VOCABULARIES for file in path.glob(kind)
        ):
            found.append((path, f"no vocabulary ({', '.join(_VOCABULARIES)})"))
        elif component not in built and has_weights:
            lacking = _missing_weights(path)
            found += [(path, lacking)] if lacking else []
    return found


def is_configured(folder: Path, component: str) -> bool:
    """Whether a component of the base in `folder` has its config: one with weights is built from config.json,
    and may have others beside it, of generation or of a tokenizer.
    """
    name = "*config.json" if component.startswith(_SUPPORT) else "config.json"
    return any(file.exists() for file in (folder / component).glob(name))


def component_texts(path: Path) -> list[Path]:
    """A component's configs, vocabularies and indexes: all but its weights; dead links among them."""
    return sorted(file for kind in CONFIG_FILES for file in path.glob(kind))


def _missing_weights(path: Path) -> str:
    """The weight files that a component lacks, in words; empty where it lacks none."""
    lacking = weight_files(path).lacking
    if lacking and any(file for kind in _PICKLED_FILES for file in path.glob(kind)):
        lacking += "; pickled weights are never loaded, convert them to safetensors"
    dead = [link for link in sorted(path.glob(WEIGHT_FILE)) if not link.exists()] if lacking else []
    return lacking + (f"; {dead[0].name} is a link to {dead[0].readlink()}, which is gone" if dead else "")


class ComponentConfig(dict[str, Any]):
    """A component's config.json, whose keys have values where they are asked for, or AccessError."""

    path: Path

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise AccessError(
                f"it does not say {key}",
                where=str(self.path),
                remedy="is this the right base model for the configured family?",
            )
        return value


def read_config(path: Path) -> ComponentConfig:
    """A component's config.json, or the index of them. Raises AccessError when it cannot be read, or is no
    mapping.
    """
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise AccessError(
            f"cannot be read ({error})",
            where=str(path),
            remedy=to_replace(path),
        ) from error
    config = ComponentConfig(content)
    config.path = path
    return config
