"""A LoRA merged into its base: a whole model that needs no adapter, written shard by shard.

The host holds one shard of the base at a time (10 GB in most repositories) and the adapter.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainer import families
from trainer.config.reading.load import Loaded
from trainer.engine.results.chat_files import write_chat_files
from trainer.engine.results.file_check import check_file
from trainer.errors import ConfigError, DataError
from trainer.families.family import Family
from trainer.files import atomic
from trainer.files.safetensors import UNREADABLE, HeaderError, read_header
from trainer.modeling.adapter.adapter_file import (
    NAME_A_RUNS,
    OTHER_PROGRAM,
    AdapterFile,
    merged_weight,
    read_adapter,
    require_shape,
)
from trainer.modeling.base.base import tokenizer_files
from trainer.modeling.base.load import shard_files
from trainer.modeling.base.source import ModelSource
from trainer.modeling.tensor_file import require_written, write_tensors
from trainer.telemetry import locks
from trainer.ways.storages import frozen
from trainer.words.plurals import numbered

_PLAIN = ("F32", "BF16", "F16")
"""Types in which a weight can be changed, by their names in headers."""
_MARK, _MARKED = ".merging", "trainer merge writes this folder; if it is killed, its next call removes it\n"
"""The file that marks a folder that is being written, and its text."""
_TEXTS = re.compile(r"(LICEN[CS]E|NOTICE|README)[\w.-]*|model_index\.json", re.IGNORECASE)
"""Files beside the components that belong to the model."""
_HEAD, _EMBEDDING = "lm_head", "embed_tokens"
"""A language model's head, and the layer that it may share its weight with."""


def merge(loaded: Loaded, source: ModelSource, lora: Path, target: Path, say: Callable[[str], None]) -> int:
    """Write `source` with the adapter `lora` in it into the new folder `target`; returns the layers changed.

    A folder beside it that a killed merge was writing is removed, by the mark that it has. Raises ConfigError
    for a quantised base and for a folder that is there, DataError for an adapter that does not fit, is not
    finite or zero, NoSpaceError.
    """
    family = families.get(loaded.config.family)
    adapter = read_adapter(lora)
    _require(loaded, family, source, adapter, lora, target)
    check_file(lora)
    _require_layers(family, source, adapter)
    _tell_other_base(source, adapter, say)
    left, _ = atomic.names_beside(target)
    if left.exists():
        say(f"{left}: left by a merge that was killed, removed")
    with atomic.whole_folder(target) as temporary, _marked(temporary):
        with atomic.no_space_told(target):
            _copy_others(family, source, temporary)
            write_chat_files(source, temporary)
        _merge_shards(family, source, adapter, temporary, say)
    return len(adapter.layers)


def _require(
    loaded: Loaded, family: Family, source: ModelSource, adapter: AdapterFile, lora: Path, target: Path
) -> None:
    """Raise for everything that is wrong before a byte is written."""
    weights, key = loaded.config.features.weights, "features.weights"
    if weights in frozen():
        what = f"`{key}: {weights}` is a base that is quantised as it loads, and merging is into its files"
        remedy = f"add `--set {key}=auto`: the LoRA is added to the weights as those files have them"
        raise ConfigError(what, where=loaded.sources.get(key, key), remedy=remedy)
    if "quantization_config" in source.component_config(family.trained_component):
        raise ConfigError(
            f"{source.identity} is stored quantised: a change as small as a LoRA's is lost in its steps",
            where="model.pretrained_model_name_or_path",
            remedy="name the base in bf16, or use the LoRA as it is",
        )
    if source.random_components:
        raise ConfigError("random weights have no files to merge into", where="model.weights")
    if adapter.layout == "comfyui":
        raise ConfigError(OTHER_PROGRAM, where=str(lora), remedy=NAME_A_RUNS)
    for path in (target, *atomic.names_beside(target)):
        if os.path.lexists(path) and not _is_left(path):
            killed = "" if path == target else "if a merge that was killed left it, remove it; else "
            if locks.is_held(path / _MARK):
                killed = "wait for the merge that writes there, or "
            raise ConfigError(
                f"{path} exists", where="--to", remedy=f"{killed}name a new folder, or move it away"
            )
    if target.resolve().is_relative_to(source.folder.resolve()):
        # the copy would hold itself
        what = f"{target} is in the base model's folder"
        raise ConfigError(what, where="--to", remedy="name another place")


def _tell_other_base(source: ModelSource, adapter: AdapterFile, say: Callable[[str], None]) -> None:
    """Say where the file names another base than `source`, or another commit of it."""
    name, revision = (adapter.metadata.get(key, "") for key in ("base_model", "base_revision"))
    if name and (name, revision) != (source.identity, source.revision or ""):
        theirs, ours = ((name, revision), (source.identity, source.revision or ""))
        if name == source.identity:  # folders of one name, or commits
            theirs, ours = ((f"{one} ({short[:12]})", "") for one, short in (theirs, ours))
        say(f"note: the LoRA was trained on {theirs[0]}, and this base is {ours[0]}")


def _require_layers(family: Family, source: ModelSource, adapter: AdapterFile) -> None:
    """Raise DataError where the headers of the base's files lack a layer of the adapter, or have it in
    another shape, ConfigError where it is stored quantised.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for file in shard_files(source.component(family.trained_component)):
        try:
            found |= read_header(file).tensors
        except (OSError, HeaderError) as error:
            what = f"cannot be read as safetensors ({error})"
            raise DataError(what, where=str(file), remedy=UNREADABLE) from error
    missing = [module for module in adapter.layers if f"{module}.weight" not in found]
    if _HEAD in missing and (embedding := min((name for name in found if _EMBEDDING in name), default=None)):
        raise DataError(
            f"{_HEAD} shares its weight with the embedding: the base's files have it once, as {embedding},"
            " and an adapter of the head would change both",
            where=source.identity,
            remedy="use the LoRA as it is, or train one without the head",
        )
    if missing:
        raise DataError(
            f"{numbered(len(missing), 'layer of the adapter is', 'layers of the adapter are')} not in the"
            f" base, first {min(missing)}",
            where=source.identity,
            remedy="the adapter is of another base model",
        )
    for module, parts in adapter.layers.items():
        entry = found[f"{module}.weight"]
        if entry["dtype"] not in _PLAIN:
            remedy = "name the base in bf16, or use the LoRA as it is"
            what = f"{module}.weight is stored quantised ({entry['dtype']})"
            raise ConfigError(what, where=source.identity, remedy=remedy)
        require_shape(tuple(entry["shape"]), parts, module)


@contextlib.contextmanager
def _marked(folder: Path) -> Iterator[None]:
    """Mark a folder as this merge's while it is written: locked, until a kill leaves it unlocked."""
    mark = folder / _MARK
    with contextlib.ExitStack() as stack:
        with atomic.no_space_told(folder):
            file = stack.enter_context(mark.open("x", encoding="utf-8"))
            with contextlib.suppress(OSError):  # a file system without locks: what is left there stays
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(_MARKED)
            file.flush()
        yield
        mark.unlink()


def _is_left(folder: Path) -> bool:
    """True for a folder that a merge was writing which was killed: it has the mark, which nobody holds."""
    mark = folder / _MARK
    if folder.is_symlink() or mark.is_symlink() or not mark.is_file():
        return False
    with atomic.reading_told(mark):
        text = mark.read_text(encoding="utf-8", errors="replace")
    return text == _MARKED and locks.is_held(mark) is False


def _copy_others(family: Family, source: ModelSource, folder: Path) -> None:
    """Everything but the weights that change: other components whole, and the texts beside the components."""
    trained = source.component(family.trained_component)
    for name in families.components(family):
        (folder / name).mkdir(exist_ok=True)
        if name != family.trained_component:
            files = _inside(source.component(name))
        else:
            files = [trained / "config.json", *sorted(trained.glob("*.safetensors.index.json"))]
            # a language model's folder holds its tokenizer as well
            files += [] if name else tokenizer_files(trained)
        for file in files:
            _copy(file, folder / name)
    for file in _inside(source.folder):
        if file.is_file() and _TEXTS.fullmatch(file.name):
            _copy(file, folder)


def _copy(file: Path, folder: Path) -> None:
    if file.is_dir():
        (folder / file.name).mkdir()
        for one in _inside(file):
            _copy(one, folder / file.name)
    else:
        atomic.copy_file(file, folder / file.name)  # a link of the hub's cache becomes a file


def _inside(folder: Path) -> list[Path]:
    with atomic.reading_told(folder):
        return sorted(folder.iterdir())


def _merge_shards(
    family: Family, source: ModelSource, adapter: AdapterFile, folder: Path, say: Callable[[str], None]
) -> None:
    """Every shard of the trained component, with the same name and the same tensors in it."""
    files = shard_files(source.component(family.trained_component))
    for number, file in enumerate(files, start=1):
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(file, framework="pt") as shard:
            metadata = {"format": "pt", **(shard.metadata() or {})}
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                tensor, module = shard.get_tensor(name), name.removesuffix(".weight")
                if module != name and module in adapter.layers:
                    merged = merged_weight(tensor, adapter.layers[module], adapter.config, module)
                    tensor = _cast(merged, tensor.dtype, module)
                tensors[name] = tensor
        target = folder / family.trained_component / file.name
        require_written(target, write_tensors(target, tensors, metadata, None))
        say(f"{file.name}: {number} of {len(files)}")


def _cast(merged: torch.Tensor, dtype: torch.dtype, module: str) -> torch.Tensor:
    """A merged weight in its file's type; DataError where that has no numbers for its values."""
    cast = merged.to(dtype)
    if not bool(cast.isfinite().all()):
        raise DataError(
            f"{module}, merged, is not finite in {str(dtype).removeprefix('torch.')}, the type of the base's"
            f" file; its largest value is {merged.abs().max().item():.3g}",
            remedy="name the base in bf16, or use the LoRA as it is",
        )
    return cast
