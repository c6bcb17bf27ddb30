"""A component whose parameters lie in rows with several ranks: each reads its own rows of every tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trainer.errors import AccessError
from trainer.files.weight_files import to_replace
from trainer.modeling.base.load import COMPUTED, renaming, shard_files
from trainer.modeling.base.structure import Structure, tied
from trainer.modeling.blocks.recompute import Blocks
from trainer.modeling.rows import Rows
from trainer.modeling.storage.trained_rows import Root, in_rows, own_rows, parameters, with_room
from trainer.words.plurals import numbered

_COMPARED_ROWS = 8192


def fill_rows(
    structure: Structure,
    blocks: Blocks,
    *,
    rank: int,
    size: int,
    on_shard: Callable[[int, int], None] = lambda done, total: None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Root:
    """The component with its values, which require gradients, in rows over `size` ranks.

    Of files each rank reads its own rows, and nothing is whole anywhere; a random component is drawn whole by
    every rank, as its library draws it, and then parted. `on_shard` and `on_bytes` are `fill_structure`'s.
    Raises AccessError where the files do not match the model.
    """
    module, device = structure.module, structure.device
    if not structure.wanted:
        root = in_rows(module.requires_grad_(True), blocks, device=device, size=size)
        on_shard(1, 1)
        return root
    files = shard_files(structure.folder)
    rename = renaming(module)
    _share(module, files, rename)
    root = in_rows(module.requires_grad_(True), blocks, device=device, size=size)
    with_room(root, device)
    filling = _Filling(structure, root, rename, rank=rank, size=size)
    sizes = [file.stat().st_size for file in files]
    for number, path in enumerate(files):
        with _opened(path) as file:
            keys = sorted(file.keys())
            for count, key in enumerate(keys, start=1):
                filling.place(file, key, where=str(path))
                on_bytes(sum(sizes[:number]) + sizes[number] * count // len(keys), sum(sizes))
        on_shard(number + 1, len(files))
    filling.require_complete()
    return root


class _Filling:
    """Places the rows of files' tensors."""

    def __init__(
        self, structure: Structure, root: Root, rename: Callable[[str], str], *, rank: int, size: int
    ) -> None:
        self._structure, self._rename = structure, rename
        self._rows = {
            name: (own_rows(one), Rows(shape=tuple(one.shape), rank=rank, size=size))
            for name, one in parameters(root)
        }
        first = {id(one): name for name, one in parameters(root)}
        every = root.model.named_parameters(remove_duplicate=False)
        self._first = {name: first[id(one)] for name, one in every}
        self._buffers = dict(structure.module.named_buffers())
        self._missing = set(self._rows)

    def place(self, file: Any, key: str, *, where: str) -> None:
        """Copy this rank's rows of a tensor, in the type that it has in the model; of buffers all."""
        name = self._rename(key)
        wanted = self._structure.wanted.get(name)
        if wanted is None:
            if COMPUTED.search(name):
                return
            raise AccessError(
                f"tensor {key} does not belong to {type(self._structure.module).__name__}",
                where=where,
                remedy="is this the right model for the configured family?",
            )
        stored = file.get_slice(key)
        if (found := tuple(stored.get_shape())) != tuple(wanted.shape):
            raise AccessError(
                f"tensor {name} is {found}, the model's is {tuple(wanted.shape)}",
                where=where,
                remedy="is this the right model for the configured family?",
            )
        if name in self._buffers:
            self._buffers[name].copy_(file.get_tensor(key))
        elif name in self._rows or self._first[name] in self._missing:  # else it is shared, and there already
            own, rows = self._rows[self._first[name]]
            if own.numel():
                own.copy_(stored[rows.start : rows.stop])
            self._missing.discard(self._first[name])

    def require_complete(self) -> None:
        """Raise AccessError where a parameter has no values."""
        if self._missing:
            raise AccessError(
                f"{numbered(len(self._missing), 'tensor of the model is', 'tensors of the model are')}"
                f" in none of its files, first {min(self._missing)}",
                where=str(self._structure.folder),
                remedy="the download may be incomplete: run `trainer fetch CONFIG` again",
            )


def _share(module: Any, files: Sequence[Path], rename: Callable[[str], str]) -> None:
    """Give weights that the files hold once, or twice with equal values, to every module that shares them,
    before they have values. The library compares values, which a model on the meta device does not have.
    """
    shared = tied(module)
    if not shared:
        return
    held = dict[str, tuple[Path, str]]()
    for path in files:
        with _opened(path) as file:
            held |= {rename(key): (path, key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    twice = {name for name, other in shared.items() if {name, other} <= held.keys()}
    equal = {name for name in twice if _equal(held[name], held[shared[name]])}
    missing = ({*shared, *shared.values()} - held.keys()) | equal
    module.tie_weights(missing_keys=missing, recompute_mapping=False)


def _equal(one: tuple[Path, str], other: tuple[Path, str]) -> bool:
    """True if two tensors, each by its file and its key there, have equal values; some rows at a time."""
    import torch

    with _opened(one[0]) as first, _opened(other[0]) as second:
        ours, theirs = first.get_slice(one[1]), second.get_slice(other[1])
        if ours.get_shape() != theirs.get_shape() or ours.get_dtype() != theirs.get_dtype():
            return False
        parts = (slice(row, row + _COMPARED_ROWS) for row in range(0, ours.get_shape()[0], _COMPARED_ROWS))
        return all(torch.equal(ours[part], theirs[part]) for part in parts)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; AccessError where it is not one."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise AccessError(
            f"not a readable safetensors file ({error})",
            where=str(path),
            remedy=to_replace(path),
        ) from error
