"""The weight files of one component: those in its folder, and those that are missing there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.errors import AccessError
from trainer.files import safetensors

State = Literal["absent", "partial", "complete"]
_ENDING = ".safetensors"
_INDEX_ENDING = f"{_ENDING}.index.json"
# diffusers' names and transformers', in the order in which their loaders look for them: with both in a folder
# diffusers reads the index, transformers the single file
_DIFFUSERS_FILE, _TRANSFORMERS_FILE = f"diffusion_pytorch_model{_ENDING}", f"model{_ENDING}"
_LIBRARY_FILES = (
    _DIFFUSERS_FILE.replace(_ENDING, _INDEX_ENDING),
    _DIFFUSERS_FILE,
    _TRANSFORMERS_FILE,
    _TRANSFORMERS_FILE.replace(_ENDING, _INDEX_ENDING),
)
# the same weights once more, in the layout of a model's own code
_OTHER_LAYOUT = re.compile(r"consolidated.*")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The files of a component's folder that a loader reads."""

    files: tuple[Path, ...]
    """Files that are there, sorted by name."""
    missing: tuple[str, ...]
    """Names of files that are missing."""
    total_bytes: int | None = None
    """Bytes of all tensors, where an index says it."""

    @property
    def state(self) -> State:
        """`partial` is an interrupted download, or a copy that lacks files."""
        if not self.files:
            return "absent"
        return "partial" if self.missing else "complete"

    @property
    def lacking(self) -> str:
        """Missing files in words; empty where none is missing."""
        if not self.missing:
            return "" if self.files else "no .safetensors file"
        count = len(self.files) + len(self.missing)
        return f"{len(self.missing)} of {count} weight files are missing, first {self.missing[0]}"


def weight_files(folder: Path) -> WeightFiles:
    """The safetensors files that hold the component: those that its library reads, by an index or by name,
    else by another index, else by their names.

    A file that no index names beside one, and the same weights in another layout, are left out; a link whose
    target is gone is a missing file. Raises AccessError for an index that cannot be read.
    """
    total = None
    indexes = sorted(path.name for path in folder.glob(f"*{_INDEX_ENDING}") if path.exists())
    chosen = next((name for name in (*_LIBRARY_FILES, *indexes) if (folder / name).exists()), "")
    if chosen.endswith(_INDEX_ENDING):
        names, total = _indexed(folder / chosen)
    else:
        names = {path.name for path in folder.glob(f"*{_ENDING}")}
        # without any that exists, the library's own is a link to a file that is gone
        single = set([name for name in (chosen, *_LIBRARY_FILES) if name in names][:1])
        names = {name for name in names if not _OTHER_LAYOUT.fullmatch(name)} or names
        names = single or names | set(_siblings(names))
    here = {name: (folder / name).exists() for name in sorted(names)}
    return WeightFiles(
        files=tuple(folder / name for name, there in here.items() if there),
        missing=tuple(name for name, there in here.items() if not there),
        total_bytes=total,
    )


_NOT_AN_INDEX = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def to_replace(file: Path) -> str:
    """The remedy for a damaged file of a base model. One of the hub's cache is a link: the hub links what is
    there once more, so what it links to has to go.
    """
    if file.is_symlink() and not file.exists():
        return "run `trainer fetch CONFIG`"
    if file.is_symlink():
        return f"delete {file.resolve()}, which it links to, and run `trainer fetch CONFIG`"
    return "copy it again; where it was downloaded delete it, and run `trainer fetch CONFIG`"


def _indexed(index: Path) -> tuple[set[str], int | None]:
    """Names of the files that an index speaks of, and the bytes of all tensors where it says them."""
    try:
        content = json.loads(index.read_text())
        names: set[str] = set(content["weight_map"].values())
        if not names or not all(name == Path(name).name and name.endswith(_ENDING) for name in names):
            raise ValueError("its weight_map does not name files beside it")
        total = content.get("metadata", {}).get("total_size")
        total = int(total) if total is not None else None
    except (OSError, *_NOT_AN_INDEX) as error:
        raise AccessError(
            f"the index of the weight files cannot be read ({type(error).__name__}: {error})",
            where=str(index),
            remedy=to_replace(index),
        ) from error
    return names, total


def _siblings(names: Iterable[str]) -> Iterable[str]:
    """All shards of the sets that these names belong to: `model-00001-of-00003` tells of two others."""
    for name in names:
        found = _SHARD.fullmatch(name)
        if found is not None:
            width = len(found["number"])
            for number in range(1, int(found["count"]) + 1):
                yield f"{found['stem']}-{number:0{width}}-of-{found['count']}{_ENDING}"


def read_header(file: Path) -> safetensors.Header:
    """The header of a weight file. Raises AccessError for a file that is none, and for one that ends before
    its last tensor does.
    """
    try:
        header, size = safetensors.read_header(file), file.stat().st_size
        if size < header.end:
            raise safetensors.HeaderError(f"it ends after {size:,} of {header.end:,} bytes")
    except (OSError, safetensors.HeaderError) as error:
        raise AccessError(
            f"not a readable safetensors file ({error})",
            where=str(file),
            remedy=to_replace(file),
        ) from error
    return header
