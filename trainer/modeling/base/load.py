"""Components of a base model: from shards on disk, streamed tensor by tensor, or seeded random
weights (`random_weights`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.errors import AccessError
from trainer.files.component_shapes import packed_tensors, stored_as
from trainer.files.weight_files import weight_files
from trainer.modeling.base.empty import (
    Waiting,
    built_empty,
    modules_inside,
    on_meta,
    stored_type,
    swap,
    tie,
    tied,
    to_device,
    to_host,
)
from trainer.modeling.base.random_weights import random_module, random_replaced
from trainer.modeling.base.reading import Shard, ShardReader
from trainer.modeling.base.source import ModelSource
from trainer.modeling.storage.quantize import Replace, count_quantized, packed_linear, replacer
from trainer.ways.storages import ENCODERS_KEEP, WAYS

# buffers that older files hold and newer models compute; transformers' own loader skips the same
_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$")


def load_component(
    component_class: Any, source: ModelSource, name: str, *, device: str, dtype: torch.dtype
) -> Any:
    """One component through its own library's `from_pretrained`, or built from its config with seeded
    weights.

    Where the source is `quantized_to` something it is a text encoder, and its layers are quantised as they
    arrive: it never exists in full precision.
    """
    if source.quantized_to is not None:
        quantized = load_streamed(
            component_class,
            source,
            name,
            device=device,
            dtype=dtype,
            replace=replacer(WAYS[source.quantized_to], ENCODERS_KEEP),
            on_shard=lambda done, total: None,
            extra_tensors=True,
        )
        count_quantized(quantized, source.quantized_to)
        return quantized.eval()
    if name in source.random_components:
        module = random_module(component_class, source, name, device=device, dtype=dtype)
    else:
        module = _from_pretrained(component_class, source.component(name), dtype)
    return module.requires_grad_(False).eval().to(device)


def load_streamed(
    component_class: Any,
    source: ModelSource,
    name: str,
    *,
    device: str,
    dtype: torch.dtype,
    replace: Replace | None,
    on_shard: Callable[[int, int], None],
    fill_zeros: bool = False,
    extra_tensors: bool = False,
    loader: str = "auto",
    on_bytes: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
    waiting: Waiting | None = None,
) -> torch.nn.Module:
    """Build on the meta device, then fill shard by shard on `device`, replacing linears as they complete.

    Peaks stay near the final size: a quantised model never exists in full precision. A checkpoint that is
    stored in nf4 is filled as it is, and `replace` not asked. `on_shard(done, total)` runs after each shard,
    `on_bytes(done, total)` after each tensor, in bytes of all shards; both may raise to stop. `loader` is the
    plan's, and `say` is told how each shard is read and why. With `fill_zeros` the matrices that a random
    base starts with at zero get values: an adapter beside a gate that is closed would learn nothing. With
    `extra_tensors` files may hold more than the model has, as `from_pretrained` of both libraries allows.
    Modules inside those that `waiting` names are left on the CPU, each as soon as it is complete. Raises
    AccessError where the files do not match the model.
    """
    if name in source.random_components:
        drawn = functools.partial(random_module, fill_zeros=fill_zeros)
        if replace is not None:
            drawn = functools.partial(random_replaced, replace=replace, waiting=waiting)
        module = drawn(component_class, source, name, device=device, dtype=dtype)
        on_shard(1, 1)
        return module.requires_grad_(False)
    folder = source.component(name)
    filling = _filling(
        component_class,
        folder,
        device=device,
        dtype=dtype,
        replace=replace,
        extra_tensors=extra_tensors,
        waiting=waiting,
    )
    with ShardReader(device, loader=loader, say=say) as reader:
        _fill_all(filling, shard_files(folder), reader, on_shard, on_bytes)
    return to_device(_complete(filling, folder), device, filling.waiting).requires_grad_(False)


def _complete(filling: _Filling, folder: Path) -> torch.nn.Module:
    """The filled model; its rope tables and other buffers are on the CPU still."""
    tie(filling.module)
    missing = on_meta(filling.module)
    if missing:
        raise AccessError(
            f"{len(missing)} tensors of the model are in none of its files, first {missing[0]}",
            where=str(folder),
            remedy="the download may be incomplete: run `trainer fetch` again",
        )
    return filling.module


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a component in the order of their names; AccessError where any is missing."""
    found = weight_files(folder)
    if found.state != "complete":
        raise AccessError(
            found.lacking,
            where=str(folder),
            remedy="run `trainer fetch`, or convert the model to safetensors",
        )
    return list(found.files)


@dataclass(frozen=True, kw_only=True)
class _Filling:
    """A model on its way from the meta device to `device`."""

    module: torch.nn.Module
    known: frozenset[str]
    """Names of the tensors that files may hold."""
    parameters: frozenset[str]
    """Those that are cast to `dtype`."""
    kept: frozenset[str]
    """Linears that share their weight, which no replacement can."""
    packed: Mapping[str, str]
    """Linear by the name of each tensor that its nf4 weight is stored in."""
    pieces: Mapping[str, int]
    """Number of tensors that each of those linears is stored in."""
    renamed: Callable[[str], str]
    """The model's name of a tensor of the files: older versions of a library had other ones."""
    extra_tensors: bool
    """Files may hold more."""
    device: str
    dtype: torch.dtype
    replace: Replace | None
    waiting: frozenset[str]
    """Modules that stay on the CPU once they are complete, with all inside them."""
    parted: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Packed tensors by linear until all are there: shards may part them."""


def _filling(
    component_class: Any,
    folder: Path,
    *,
    device: str,
    dtype: torch.dtype,
    replace: Replace | None,
    extra_tensors: bool,
    waiting: Waiting | None,
) -> _Filling:
    """The component on the meta device, with its buffers computed on the CPU."""
    import transformers

    packed = packed_tensors(folder) if stored_as(folder) else {}
    module = built_empty(component_class, folder, dtype)
    known = frozenset(module.state_dict())
    parameters = known
    if isinstance(module, transformers.PreTrainedModel):
        # its rope tables stay in fp32
        parameters = frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))
    return _Filling(
        module=module,
        known=known,
        parameters=parameters,
        kept=tied(module),
        packed={tensor: linear for linear, tensors in packed.items() for tensor in tensors},
        pieces={linear: len(tensors) for linear, tensors in packed.items()},
        renamed=renaming(module),
        extra_tensors=extra_tensors,
        device=device,
        dtype=dtype,
        replace=None if packed else replace,
        waiting=modules_inside(module, waiting),
    )


def renaming(module: torch.nn.Module) -> Callable[[str], str]:
    """How transformers' own loader names the tensors of older files."""
    import transformers

    if not isinstance(module, transformers.PreTrainedModel):
        return lambda name: name
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [one for one in get_model_conversion_mapping(module) if isinstance(one, WeightRenaming)]
    state, prefix = module.state_dict(), module.base_model_prefix

    def renamed(name: str) -> str:
        found: str = rename_source_key(name, renamings, [], prefix, state)[0]
        return found

    return renamed


def _fill_all(
    filling: _Filling,
    shards: Sequence[Path],
    reader: ShardReader,
    on_shard: Callable[[int, int], None],
    on_bytes: Callable[[int, int], None] | None,
) -> None:
    """Fill shard by shard."""
    sizes = [shard.stat().st_size for shard in shards]
    for number, shard in enumerate(shards):
        before = sum(sizes[:number])

        def passed(end: int, before: int = before) -> None:
            if on_bytes is not None:
                on_bytes(before + end, sum(sizes))

        _fill(filling, shard, reader, passed)
        if torch.device(filling.device).type == "cuda":
            # what full-precision layers left between those that replaced them
            torch.cuda.empty_cache()
        on_shard(number + 1, len(shards))


def _fill(filling: _Filling, shard: Path, reader: ShardReader, passed: Callable[[int], None]) -> None:
    """Place one shard's tensors and replace every linear that became complete.

    `passed` gets the byte of the file that each ends before.
    """
    from safetensors import SafetensorError

    try:
        with reader.open(shard) as file:
            for key, end in file.ends.items():
                linear = filling.packed.get(key)
                name = filling.renamed(key) if linear is None else f"{linear}.weight"
                if name not in filling.known and (filling.extra_tensors or _COMPUTED.search(name)):
                    continue
                if name not in filling.known:
                    raise AccessError(
                        f"tensor {key} does not belong to {type(filling.module).__name__}",
                        where=str(shard),
                        remedy="is this the right model for the configured family?",
                    )
                if linear is None:
                    _place(filling, name, key, file)
                else:
                    _place_packed(filling, key, linear, file, shard)
                passed(end)
    except SafetensorError as error:
        raise AccessError(
            f"not a readable safetensors file ({error})",
            where=str(shard),
            remedy="delete it and run `trainer fetch`",
        ) from error


def _place(filling: _Filling, name: str, key: str, file: Shard) -> None:
    """One tensor; no reference to it outlives its replacement."""
    from accelerate.utils import set_module_tensor_to_device

    dtype = stored_type(filling.module, name, filling.dtype) if name in filling.parameters else None
    value = file.get_tensor(key)
    # emptying the allocator's cache for every tensor would wait for the device each time
    set_module_tensor_to_device(
        filling.module, name, filling.device, value=value, dtype=dtype, clear_cache=False
    )
    del value
    owner = name.rpartition(".")[0]
    if filling.replace is not None and owner not in filling.kept:
        _replace_if_complete(filling.module, owner, filling.replace)
    if owner in filling.waiting:
        to_host(filling.module, owner)


def _place_packed(filling: _Filling, key: str, linear: str, file: Shard, shard: Path) -> None:
    """One tensor of an nf4 weight, which takes its place with the last of them."""
    tensors = filling.parted.setdefault(linear, {})
    tensors[key] = file.get_tensor(key)
    if len(tensors) < filling.pieces[linear]:
        return
    del filling.parted[linear]
    module = filling.module.get_submodule(linear)
    assert isinstance(module, torch.nn.Linear), linear
    packed = packed_linear(linear, module, tensors, filling.device, where=str(shard))
    swap(filling.module, linear, packed)
    if linear in filling.waiting:
        to_host(filling.module, linear)


def _replace_if_complete(module: torch.nn.Module, name: str, replace: Replace) -> None:
    child = module.get_submodule(name)
    if isinstance(child, torch.nn.Linear) and all(p.device.type != "meta" for p in child.parameters()):
        swap(module, name, replace(name, child))


def _from_pretrained(component_class: Any, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Both libraries' loader; they name the argument for the type differently.

    Raises AccessError also for tensors that the files lack: the loaders draw them at random, with a warning.
    """
    import transformers
    from safetensors import SafetensorError

    options: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    options["dtype" if issubclass(component_class, transformers.PreTrainedModel) else "torch_dtype"] = dtype
    remedy = "run `trainer fetch` to complete the model, or copy the component again"
    try:
        module, found = component_class.from_pretrained(folder, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise AccessError(str(error), where=str(folder), remedy=remedy) from error
    # prompts are encoded without the head that a language model answers with, and some copies leave it out
    missing = sorted(name for name in found["missing_keys"] if not name.startswith("lm_head."))
    if missing:
        raise AccessError(
            f"{len(missing)} tensors of {component_class.__name__} are in none of its files, first"
            f" {missing[0]}",
            where=str(folder),
            remedy=remedy,
        )
    loaded: torch.nn.Module = module
    return loaded
