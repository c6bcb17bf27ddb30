"""A run's base model, complete on this disk: a folder, or a repository of the hub. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer.errors import AccessError, Problem
from trainer.files.weight_files import weight_files
from trainer.modeling.base import hub
from trainer.modeling.base.base import (
    CONFIG_FILES,
    WEIGHT_FILE,
    Base,
    ComponentConfig,
    base_at,
    can_download,
    component_texts,
    is_configured,
    is_repository,
    local_folder,
    read_config,
)
from trainer.ways import chat_templates

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

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
    """Components that are built from their config.json with seeded weights; all others are loaded."""
    seed: int
    """Seed of random weights."""
    quantized_to: str | None = None
    """`int8` or `nf4`: storage `load_component` gives layers of text encoders; None: the type asked for."""
    chat_template: str | None = None
    """Text of the run's chat template in place of the tokenizer's own; None: the tokenizer's."""

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


def prepare(config: RunConfig, components: Sequence[str], *, trained: str) -> None:
    """Make sure that a plan can be made of the right model, before its weights are here.

    Downloads the files beside the weights, some megabytes, where a config is missing. Raises AccessError
    where missing files cannot or must not be downloaded, NoSpaceError.
    """
    base = base_at(local_folder(config), config, components, trained=trained)
    if base.state == "complete":
        return
    if not can_download(config):
        _refuse(config, base)
    if base.folder is not None and all(is_configured(base.folder, name) for name in components):
        return
    patterns = _patterns(components, "random")
    hub.download(config.model.pretrained_model_name_or_path, config.model.revision, patterns)


def resolve_source(
    config: RunConfig,
    components: Sequence[str],
    *,
    trained: str,
    update: bool = False,
    on_start: Callable[[hub.Download], None] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> ModelSource:
    """The base model with all `components`, complete on this disk; missing files are downloaded.

    With `model.weights: random` the component `trained` is always built, the others where the folder holds no
    .safetensors of theirs; nothing but configs is downloaded then.
    A repository that is here already is used without asking the hub, so that a resumed run finds the commit
    that it began with; `update` asks for the newest. `on_start` and `on_bytes` are those of `hub.download`.
    Raises ConfigError (no such folder, or chat template), AccessError (incomplete, gated, not found,
    offline), NoSpaceError.
    """
    identity, model = config.model.pretrained_model_name_or_path, config.model
    base = base_at(local_folder(config), config, components, trained=trained)
    if base.state != "complete" and not can_download(config):
        _refuse(config, base)
    if can_download(config) and (update or base.state != "complete"):
        patterns = _patterns(components, model.weights)
        hub.download(identity, model.revision, patterns, on_start=on_start, on_bytes=on_bytes)
        remedy = "is this a repository in diffusers' layout, and the right one for the family?"
        if model.weights == "random":
            remedy += " `trainer fetch CONFIG --set model.weights=pretrained` completes what was cut off"
        base = base_at(local_folder(config), config, components, trained=trained)
        _require_complete(base, remedy=remedy)
    assert base.folder is not None
    revision = base.folder.name
    if not is_repository(config):
        identity = base.folder.resolve().name
        revision = fingerprint(base.folder, components, base.built)
    return ModelSource(
        folder=base.folder,
        identity=identity,
        revision=revision,
        random_components=base.built,
        seed=config.train.seed,
        chat_template=chat_templates.text_of(config.data.chat_template),
    )


def pinned(config: RunConfig, source: ModelSource) -> RunConfig:
    """The configuration with the repository's commit that was used: it gives the same base again."""
    if not is_repository(config):
        return config
    model = config.model.model_copy(update={"revision": source.revision})
    return config.model_copy(update={"model": model})


def _called(component: str) -> str:
    """The name of a component in messages; the one of a language model has none itself."""
    return component or "model"


def weights_line(source: ModelSource, components: Sequence[str]) -> str:
    """One line for people: which of the components with weights are built, and which are loaded."""
    built = [_called(name) for name in components if name in source.random_components]
    others = [name for name in components if name not in source.random_components]
    loaded = [_called(name) for name in others if (source.folder / name / "config.json").exists()]
    made = f"built from config.json with seed {source.seed}: {', '.join(built)}; " if built else ""
    return f"{made}loaded: {', '.join(loaded) or 'none'}"


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
        where=hub.KEY,
        remedy="run `trainer fetch CONFIG --set model.download=auto` without HF_HUB_OFFLINE where there is"
        " network, with this HF_HOME; or name a local folder",
    )


def _patterns(components: Sequence[str], weights: str) -> list[str]:
    """Files to download: never pickled weights, and none at all for random ones."""
    kinds = CONFIG_FILES if weights == "random" else (*CONFIG_FILES, WEIGHT_FILE)
    # the component of an empty name is the repository itself
    inside = [f"{component}/{kind}".lstrip("/") for component in components for kind in kinds]
    return ["model_index.json", *inside]


def _require_complete(base: Base, *, remedy: str) -> None:
    if base.missing:
        *others, (path, what) = base.missing
        raise AccessError(
            [Problem(what=other, where=str(place)) for place, other in others]
            + [Problem(what=what, where=str(path), remedy=remedy)]
        )


def fingerprint(folder: Path, components: Sequence[str], built: Collection[str]) -> str:
    """The sha256 of names, sizes, config bytes and evenly spaced blocks of the weight files that are loaded;
    weights of components in `built` do not count.
    """
    digest = hashlib.sha256()
    for component in sorted(components):
        path = folder / component
        weights = () if component in built else weight_files(path).files
        for file in sorted([*component_texts(path), *weights]):
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
