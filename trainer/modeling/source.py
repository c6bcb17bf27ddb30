"""Floor 4: where a run's base model comes from: a folder, or a repository of the hub. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.errors import AccessError, ConfigError, Problem
from trainer.hardware.weight_files import State, weight_files
from trainer.modeling import hub

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

_KEY = "model.pretrained_model_name_or_path"
_CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_WEIGHT_FILE = "*.safetensors"
_PICKLED_FILES = ("*.bin", "*.pt", "*.ckpt", "*.msgpack")
# other weights differ in these blocks; reading tens of gigabytes at every start would take minutes
_SAMPLED_BLOCKS = 16
_BLOCK_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A base model on this disk, with what identifies it in checkpoints, caches and saved files."""

    folder: Path
    identity: str
    """Repository id, or the folder's name without the path to it."""
    revision: str | None
    """Commit of the repository, or a fingerprint of the folder's files."""
    random_components: frozenset[str]
    """Those that are built from their config.json with seeded weights; all others are loaded."""
    seed: int
    """Seed of random weights."""
    quantized_to: str | None = None
    """`int8` or `nf4`: storage `load_component` gives layers of text encoders; None: the type asked for."""

    @property
    def weights(self) -> str:
        """`pretrained`, or `random` with the components that are: for records and comparisons."""
        built = ", ".join(sorted(map(_called, self.random_components)))
        return f"random ({built})" if built else "pretrained"

    def component(self, name: str) -> Path:
        """Folder of one component. Raises AccessError when the model has none of that name."""
        path = self.folder / name
        if not path.is_dir():
            raise AccessError(
                f"the base model has no component {name!r}",
                where=str(self.folder),
                remedy="is this the right model for the configured family?",
            )
        return path

    def component_config(self, name: str) -> ComponentConfig:
        """A component's config.json. Raises AccessError when it cannot be read."""
        return read_config(self.component(name) / "config.json")


def local_folder(config: RunConfig) -> Path | None:
    """The base model's folder as far as it is on this disk already; None for a repository that is not.

    Asks nobody and checks nothing inside. Raises ConfigError for a path that does not exist.
    """
    name = config.model.pretrained_model_name_or_path
    path = Path(name)
    if path.is_dir():
        return path
    if not hub.is_repository_id(name):
        raise ConfigError(
            f"the base model's folder {name} does not exist",
            where=_KEY,
            remedy="name a folder in diffusers' layout, or a repository of the hub (OWNER/NAME)",
        )
    # a language model's folder has a config.json in place of the index of its parts
    for index in ("model_index.json", "config.json"):
        folder = hub.cached(name, config.model.revision, [index])
        if folder is not None and (folder / index).is_file():
            return folder
    return None


@dataclass(frozen=True, kw_only=True)
class Base:
    """Where a run's base model is, as far as it is on this disk."""

    folder: Path | None
    """None: absent."""
    missing: tuple[tuple[Path, str], ...]
    """What keeps its components from loading, as (path, what is wrong)."""
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
        """What is missing in words, the first of it with its place; empty where nothing is."""
        if self.folder is None:
            return "nothing of it is on this disk yet"
        if not self.missing:
            return ""
        path, what = self.missing[0]
        place = "" if path == self.folder else f"{path.relative_to(self.folder)}: "
        more = f", and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
        return place + what + more


def find_base(config: RunConfig, components: Sequence[str], *, trained: str) -> Base:
    """The one answer to where the base model is, for planner, loader, fetch and preflight. Asks no network.

    Raises ConfigError for a path that does not exist, AccessError for an index that cannot be read.
    """
    return base_at(local_folder(config), config, components, trained=trained)


def base_at(folder: Path | None, config: RunConfig, components: Sequence[str], *, trained: str) -> Base:
    """`find_base` of a folder that was found already."""
    if folder is None:
        return Base(folder=None, missing=(), built=frozenset())
    built = _random_components(config, folder, components, trained)
    return Base(folder=folder, missing=tuple(_missing(folder, components, built)), built=built)


def is_repository(config: RunConfig) -> bool:
    """Whether the base model is named as a repository of the hub, so that missing files can be downloaded."""
    return not Path(config.model.pretrained_model_name_or_path).is_dir()


def can_download(config: RunConfig) -> bool:
    """Whether neither configuration nor environment forbids asking the hub for the base model."""
    return is_repository(config) and config.model.download != "never" and not hub.is_offline()


def prepare(config: RunConfig, components: Sequence[str], *, trained: str) -> None:
    """Make sure that a plan can be made of the right model, before its weights are here.

    Downloads configs and indexes, some kilobytes, where one is missing. Raises AccessError where files are
    missing that cannot or must not be downloaded, NoSpaceError.
    """
    base = find_base(config, components, trained=trained)
    if base.state == "complete":
        return
    if not can_download(config):
        _refuse(config, base)
    if base.folder is not None and all(_is_configured(base.folder / name) for name in components):
        return
    kinds = ("*config.json", "*.safetensors.index.json")
    patterns = ["model_index.json", *(_inside(name, kind) for name in components for kind in kinds)]
    hub.download(config.model.pretrained_model_name_or_path, config.model.revision, patterns)


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of a language model's folder that belong to its tokenizer and to generation."""
    found = sorted(path for kind in _CONFIG_FILES for path in folder.glob(kind))
    return [path for path in found if path.name != "config.json" and not path.name.endswith(".index.json")]


def resolve_source(
    config: RunConfig,
    components: Sequence[str],
    *,
    trained: str,
    update: bool = False,
    on_start: Callable[[hub.Download], None] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> ModelSource:
    """The base model with all `components`, complete on this disk; downloads what is missing.

    With `model.weights: random` the component `trained` is always built, the others where the folder holds no
    .safetensors of theirs; nothing but configs is downloaded then.
    A repository that is here already is used without asking the hub, so that a resumed run finds the commit
    that it began with; `update` asks for the newest. `on_start` and `on_bytes` are those of `hub.download`.
    Raises ConfigError (no such folder), AccessError (incomplete, gated, not found, offline), NoSpaceError.
    """
    identity = config.model.pretrained_model_name_or_path
    base = find_base(config, components, trained=trained)
    if Path(identity).is_dir():
        assert base.folder is not None
        if base.missing:
            _refuse(config, base)
        identity = base.folder.resolve().name
        revision = _fingerprint(base.folder, components, base.built)
    else:
        base = _from_hub(
            config, base, components, trained, update=update, on_start=on_start, on_bytes=on_bytes
        )
        assert base.folder is not None
        revision = base.folder.name
    return ModelSource(
        folder=base.folder,
        identity=identity,
        revision=revision,
        random_components=base.built,
        seed=config.train.seed,
    )


def _called(component: str) -> str:
    """How a component is called; the one of a language model has no name."""
    return component or "model"


def weights_line(source: ModelSource, components: Sequence[str]) -> str:
    """One line for people: which of the components with weights are built, and which are loaded."""
    built = [_called(name) for name in components if name in source.random_components]
    others = [name for name in components if name not in source.random_components]
    loaded = [_called(name) for name in others if _has_config(source.folder / name)]
    made = f"built from config.json with seed {source.seed}: {', '.join(built)}; " if built else ""
    return f"{made}loaded: {', '.join(loaded) or 'none'}"


def _random_components(
    config: RunConfig, folder: Path, components: Sequence[str], trained: str
) -> frozenset[str]:
    """The components that `model.weights` has built in place of loaded."""
    if config.model.weights == "pretrained":
        return frozenset()
    bare = (
        name
        for name in components
        if _has_config(folder / name) and weight_files(folder / name).state == "absent"
    )
    return frozenset({trained, *bare})


def _has_config(path: Path) -> bool:
    """Whether a component has weights: tokenizers and schedulers have a config of another name."""
    return (path / "config.json").exists()


def _from_hub(
    config: RunConfig,
    base: Base,
    components: Sequence[str],
    trained: str,
    *,
    update: bool,
    on_start: Callable[[hub.Download], None] | None,
    on_bytes: Callable[[int, int], None] | None,
) -> Base:
    """The repository, complete; the name of its folder is its commit."""
    model = config.model
    if base.state == "complete" and not (update and can_download(config)):
        return base
    if not can_download(config):
        _refuse(config, base)
    patterns = _patterns(components, model.weights)
    name = model.pretrained_model_name_or_path
    hub.download(name, model.revision, patterns, on_start=on_start, on_bytes=on_bytes)
    remedy = "is this a repository in diffusers' layout, and the right one for the family?"
    if model.weights == "random":
        remedy += " `trainer fetch --set model.weights=pretrained` completes weights that were cut off"
    base = find_base(config, components, trained=trained)
    _require_complete(base, remedy=remedy)
    return base


def _refuse(config: RunConfig, base: Base) -> NoReturn:
    """Raise AccessError for a base that is not complete and will not be completed."""
    model = config.model
    if not is_repository(config):
        _require_complete(base, remedy="copy the missing files into the folder")
    forbidden = "model.download: never" if model.download == "never" else "HF_HUB_OFFLINE"
    at = f" at revision {model.revision}" if model.revision else ""
    raise AccessError(
        f"{model.pretrained_model_name_or_path}{at} is not complete on this disk ({base.missing_line}), and"
        f" {forbidden} forbids downloading it",
        where=_KEY,
        remedy="run `trainer fetch` where there is network and with this HF_HOME, or name a local folder",
    )


def _patterns(components: Sequence[str], weights: str) -> list[str]:
    """Files to download: never pickled weights, and none at all for random ones."""
    kinds = _CONFIG_FILES if weights == "random" else (*_CONFIG_FILES, _WEIGHT_FILE)
    return ["model_index.json", *(_inside(component, kind) for component in components for kind in kinds)]


def _inside(component: str, name: str) -> str:
    """A path in the repository; the component of an empty name is the repository itself."""
    return f"{component}/{name}" if component else name


def _require_complete(base: Base, *, remedy: str) -> None:
    if base.missing:
        *others, (path, what) = base.missing
        raise AccessError(
            [Problem(what=other, where=str(place)) for place, other in others]
            + [Problem(what=what, where=str(path), remedy=remedy)]
        )


def _missing(folder: Path, components: Sequence[str], built: Collection[str]) -> list[tuple[Path, str]]:
    """What keeps the components from loading, as (path, what is wrong); those in `built` need no weights."""
    found: list[tuple[Path, str]] = []
    for component in components:
        path = folder / component
        # a link whose blob is not there does not exist
        dead = [file for file in _config_files(path) if not file.exists()]
        if not path.is_dir():
            found.append((path, f"the base model has no component {component!r}"))
        elif dead:
            found.append((dead[0], "a link to a file that is gone"))
        elif not _is_configured(path):
            found.append((path, "no config file"))
        elif not component and not _has_config(path):
            found.append((path, "no config.json"))  # a tokenizer that was fetched by itself
        elif component not in built and _has_config(path):
            found.extend(_missing_weights(path))
    return found


def _is_configured(path: Path) -> bool:
    """Whether a component's folder says what it is."""
    return any(file.exists() for file in path.glob("*config.json"))


def component_texts(folder: Path) -> list[Path]:
    """A component's configs, vocabularies and indexes: all but its weights."""
    return [file for file in _config_files(folder) if file.exists()]


def _config_files(path: Path) -> list[Path]:
    return sorted(file for kind in _CONFIG_FILES for file in path.glob(kind))


def _missing_weights(path: Path) -> Iterator[tuple[Path, str]]:
    lacking = weight_files(path).lacking
    if lacking:
        pickled = any(file for kind in _PICKLED_FILES for file in path.glob(kind))
        hint = "; pickled weights are never loaded, convert them to safetensors" if pickled else ""
        yield path, lacking + hint


def _fingerprint(folder: Path, components: Sequence[str], built: Collection[str]) -> str:
    """sha256 over names, sizes, config bytes and evenly spaced blocks of the weight files that are loaded."""
    digest = hashlib.sha256()
    for component in sorted(components):
        path = folder / component
        weights = () if component in built else weight_files(path).files
        for file in sorted([*_config_files(path), *weights]):
            size = file.stat().st_size
            digest.update(f"{component}/{file.name} {size}\n".encode())
            with file.open("rb") as stream:
                if file.suffix != ".safetensors" or size <= _SAMPLED_BLOCKS * _BLOCK_BYTES:
                    digest.update(stream.read())
                    continue
                for block in range(_SAMPLED_BLOCKS):
                    stream.seek((size - _BLOCK_BYTES) * block // (_SAMPLED_BLOCKS - 1))
                    digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()


class ComponentConfig(dict[str, Any]):
    """A component's config.json, whose keys have values where they are asked for, or AccessError."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        super().__init__(values)
        self.path = path

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
    """A component's config.json. Raises AccessError when it cannot be read, or is no mapping."""
    return ComponentConfig(read_json(path), path)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise AccessError(
            f"cannot be read ({error})",
            where=str(path),
            remedy="is the base model complete? Run `trainer fetch`",
        ) from error
    return content
