"""CLIP and DINOv2 models as features of pictures and texts: on the CPU in float32, one at a time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from trainer.config.schema import ValidationSection
from trainer.errors import AccessError, ConfigError
from trainer.files.weight_files import weight_files
from trainer.modeling.base import hub
from trainer.modeling.base.base import CONFIG_FILES, WEIGHT_FILE, read_config
from trainer.modeling.base.source import fingerprint
from trainer.modeling.vision import make_torchvision_importable
from trainer.words.plurals import numbered

Kind = Literal["clip", "dinov2"]
_TYPES: dict[Kind, tuple[str, ...]] = {"clip": ("clip",), "dinov2": ("dinov2", "dinov2_with_registers")}
"""Types of models by their config.json."""
_TITLES: dict[Kind, str] = {"clip": "CLIP", "dinov2": "DINOv2"}
OF_CLIP = frozenset({"clip_t"})
"""Metrics of CLIP's features; all others are of DINOv2's."""
_PARTS: dict[Kind, dict[str, tuple[str, ...]]] = {
    "clip": {
        "preprocessor": ("preprocessor_config.json", "processor_config.json"),
        "tokenizer": ("tokenizer.json", "vocab.json"),
    },
    "dinov2": {"preprocessor": ("preprocessor_config.json", "processor_config.json")},
}
"""Parts of a model beside config and weights, by the files one of which transformers reads."""
_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class ScoringModel:
    """A model on this disk that features are taken from."""

    kind: Kind
    folder: Path
    name: str
    """The repository, or the folder's name."""
    key: str
    """Where it was named, for messages."""

    @property
    def identity(self) -> str:
        """Hash of its files: figures of models with unequal ones do not compare."""
        return fingerprint(self.folder, [""], ())[:16]


def resolve(
    kind: Kind,
    name: str,
    key: str,
    *,
    download: bool = True,
    on_start: Callable[[hub.Download], None] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> ScoringModel:
    """The model of a folder, or of a repository of the hub, downloaded where it is not here and `download`.
    `on_start` and `on_bytes` are those of `hub.download`.

    Raises ConfigError for a path that does not exist, AccessError for a model that is incomplete, of another
    kind, or may not be downloaded, NoSpaceError.
    """
    path = Path(name)
    if path.is_dir():
        _require_model(kind, path, key)
        return ScoringModel(kind=kind, folder=path, name=path.resolve().name, key=key)
    if not hub.is_repository_id(name):
        remedy = f"name the folder of a {_TITLES[kind]} model of transformers, or a repository (OWNER/NAME)"
        raise ConfigError(
            f"the {_TITLES[kind]} model's folder {name} does not exist", where=key, remedy=remedy
        )
    folder = hub.cached(name, None)
    # another program may have fetched the model alone
    if folder is None or not (folder / "config.json").exists() or _lacking(kind, folder):
        if hub.is_offline() or not download:
            forbidden = "HF_HUB_OFFLINE" if hub.is_offline() else "model.download: never"
            raise AccessError(
                f"{name} is not complete on this disk, and {forbidden} forbids downloading it",
                where=key,
                remedy=f"download it where there is network and with this HF_HOME, or name a folder of a"
                f" {_TITLES[kind]} model",
            )
        files = [*CONFIG_FILES, WEIGHT_FILE]
        folder = hub.download(name, None, files, on_start=on_start, on_bytes=on_bytes, key=key)
    _require_model(kind, folder, key)
    return ScoringModel(kind=kind, folder=folder, name=name, key=key)


def models_of(
    validation: ValidationSection,
    *,
    download: bool = True,
    on_start: Callable[[hub.Download], None] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> dict[Kind, ScoringModel]:
    """The models that `validation.metrics` takes features from, as `resolve` finds them; raises as it."""
    metrics = set(validation.metrics)
    names: dict[Kind, tuple[str, str]] = {}
    if metrics & OF_CLIP:
        names["clip"] = (validation.clip_model, "validation.clip_model")
    if metrics - OF_CLIP:
        names["dinov2"] = (validation.dinov2_model, "validation.dinov2_model")
    return {
        kind: resolve(kind, *name, download=download, on_start=on_start, on_bytes=on_bytes)
        for kind, name in names.items()
    }


def _require_model(kind: Kind, folder: Path, key: str) -> None:
    """Raise AccessError where a folder does not hold a whole model of this kind."""
    parts = " and ".join(_PARTS[kind])
    remedy = f"name a folder of a {_TITLES[kind]} model as transformers saves it, with its {parts}"
    if not (folder / "config.json").is_file():
        raise AccessError(f"{folder} has no config.json", where=key, remedy=remedy)
    found = read_config(folder / "config.json").get("model_type")
    if found not in _TYPES[kind]:
        raise AccessError(f"{folder} holds a model of type {found}", where=key, remedy=remedy)
    if lacking := _lacking(kind, folder):
        raise AccessError(f"{folder}: {lacking}", where=key, remedy=remedy)


def _lacking(kind: Kind, folder: Path) -> str:
    """Which files a model's folder lacks beside its config.json, in words; empty where it lacks none."""
    absent = [
        f"no {part} ({' or '.join(names)})"
        for part, names in _PARTS[kind].items()
        if not any((folder / name).is_file() for name in names)
    ]
    return "; ".join([*filter(None, [weight_files(folder).lacking]), *absent])


@dataclass(frozen=True, kw_only=True)
class Features:
    """A loaded model."""

    model: ScoringModel
    network: Any
    processor: Any
    tokenizer: Any
    """None for a model that reads no text."""

    def of_pictures(self, pictures: Sequence[Callable[[], Image.Image]], alive: Callable[[], None]) -> Tensor:
        """Features (n, d) in float32 of pictures, each opened when its turn comes; `alive` runs between
        batches and may raise.
        """
        rows = []
        for start in range(0, len(pictures), _BATCH):
            alive()
            images = [opened() for opened in pictures[start : start + _BATCH]]
            pixels = self.processor(images=images, return_tensors="pt")["pixel_values"]
            with torch.inference_mode():
                of = self.network.get_image_features if self.model.kind == "clip" else self.network
                rows.append(of(pixel_values=pixels).pooler_output.clone())
        return torch.cat(rows)

    def of_texts(self, texts: Sequence[str], alive: Callable[[], None]) -> tuple[Tensor, int]:
        """Features (n, d) in float32 of texts, and how many of them are cut to the model's length."""
        length = self.network.config.text_config.max_position_embeddings
        counts = [len(ids) for ids in self.tokenizer(list(texts))["input_ids"]]
        rows = []
        for start in range(0, len(texts), _BATCH):
            alive()
            given = self.tokenizer(
                list(texts[start : start + _BATCH]),
                padding=True,
                truncation=True,
                max_length=length,
                return_tensors="pt",
            )
            tokens = {name: given[name] for name in ("input_ids", "attention_mask")}
            with torch.inference_mode():
                rows.append(self.network.get_text_features(**tokens).pooler_output.clone())
        return torch.cat(rows), sum(count > length for count in counts)


@contextlib.contextmanager
def loaded(model: ScoringModel) -> Iterator[Features]:
    """The model in memory for the time of the block, on the CPU in float32. Raises AccessError where its
    files are not those of such a model.
    """
    make_torchvision_importable()
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, CLIPModel

    loader: Any = CLIPModel if model.kind == "clip" else AutoModel
    try:
        network, said = loader.from_pretrained(
            model.folder,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        processor = AutoImageProcessor.from_pretrained(model.folder, local_files_only=True)
        tokenizer = None
        if model.kind == "clip":
            tokenizer = AutoTokenizer.from_pretrained(model.folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        what = f"the {_TITLES[model.kind]} model cannot be loaded ({error})"
        remedy = "is the folder complete: config, weights, preprocessor, and of CLIP the tokenizer?"
        raise AccessError(f"{model.folder}: {what}", where=model.key, remedy=remedy) from error
    if said["missing_keys"]:
        names = sorted(said["missing_keys"])
        what = f"{model.folder}: the weights lack {numbered(len(names), 'tensor')}, first {names[0]}"
        raise AccessError(what, where=model.key, remedy="copy or download the model again")
    try:
        yield Features(model=model, network=network.eval(), processor=processor, tokenizer=tokenizer)
    finally:
        del network
        gc.collect()
