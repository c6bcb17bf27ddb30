"""Components of a base model: structure first, values second.

A component is built on the meta device, layers that will hold quantised weights take the place of its linears
there, and then values come tensor by tensor: from shards on disk, some of them nf4 bytes, or drawn at random.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from trainer.errors import AccessError
from trainer.files.component_shapes import packed_tensors, stored_as
from trainer.files.weight_files import to_replace, weight_files
from trainer.modeling.base.random_weights import Absent, draw, random_module
from trainer.modeling.base.reading import Shard, ShardReader
from trainer.modeling.base.source import ModelSource
from trainer.modeling.base.structure import Structure, built_empty, tied
from trainer.modeling.storage.layers import Replace, count_quantized, replacer
from trainer.modeling.storage.nf4 import Nf4Linear
from trainer.ways.storages import ENCODERS_KEEP, WAYS
from trainer.words.plurals import numbered


@dataclass(frozen=True, kw_only=True)
class Readers:
    """The processes that load one component at the same time."""

    member: int = 0
    size: int = 1
    send: Callable[[torch.Tensor, int], None] = lambda tensor, source: None
    """Writes the tensor of process `source` to that of all others."""
    parted: Collection[str] = ()
    """Names of modules, of which each process has others: these it reads for itself."""
    run_bytes: int = 64 * 2**20
    """Bytes of a file that one process reads before the next one's turn: disks and rings read ahead."""

    def is_parted(self, name: str) -> bool:
        """True for a tensor that this process reads for itself, or not at all."""
        return self.size == 1 or any(name.startswith(f"{one}.") for one in self.parted)


ALONE = Readers()

# buffers that older files hold and newer models compute; transformers' own loader skips the same
COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$")

UNUSED_HEAD = "lm_head."
"""Beginning of the names of a head that a language model answers with: prompts are encoded without, and some
copies leave it out.
"""


def load_component(
    component_class: Any, source: ModelSource, name: str, *, device: str, dtype: torch.dtype
) -> Any:
    """One component through its own library's `from_pretrained`, or built from its config with seeded
    weights.

    Where the source is `quantized_to` something it is a text encoder, and its layers are quantised as they
    arrive: it never exists in full precision.
    """
    weights = source.quantized_to
    if weights is None and name not in source.random_components:
        module = _from_pretrained(component_class, source.component(name), dtype)
        return module.requires_grad_(False).eval().to(device)
    replace = None if weights is None else replacer(WAYS[weights], ENCODERS_KEEP)
    structure = build_structure(component_class, source, name, device=device, dtype=dtype, replace=replace)
    module = fill_structure(structure, is_encoder=True)
    if weights is not None:
        count_quantized(module, weights)
    return module.eval()


def build_structure(
    component_class: Any,
    source: ModelSource,
    name: str,
    *,
    device: str,
    dtype: torch.dtype,
    replace: Replace | None,
    fill_zeros: bool = False,
    absent: Absent | None = None,
) -> Structure:
    """A component on the meta device, with the layers that `replace` puts in the place of its linears.

    Files that hold nf4 bytes say themselves which linears these are of; `replace` is not asked then. A random
    component without replacements has its values at once, as its library draws them; with `fill_zeros` the
    matrices that start at zero get some: an adapter beside a gate that is closed would learn nothing. Its
    modules that are `absent` have none.
    """
    folder, is_random = source.component(name), name in source.random_components
    label = f"{source.seed}/{name}" if is_random else ""
    if is_random and replace is None:
        module = random_module(
            component_class, folder, label, device=device, dtype=dtype, fill_zeros=fill_zeros, absent=absent
        )
        return Structure(module=module, folder=folder, device=device)
    module = built_empty(component_class, folder, dtype)
    wanted = {key: tensor.to("meta") for key, tensor in module.state_dict().items()}
    stored = packed_tensors(folder) if not is_random and stored_as(folder) else {}
    shared = {key.rpartition(".")[0] for pair in tied(module).items() for key in pair}
    for layer, linear in list(module.named_modules()):
        if not isinstance(linear, torch.nn.Linear):
            continue
        new: torch.nn.Module | None = None
        if stored:
            new = Nf4Linear(linear, WAYS["nf4"]) if layer in stored else None
        elif replace is not None and layer not in shared:
            new = replace(layer, linear)
        if new is not None:
            module.set_submodule(layer, new)
    return Structure(
        module=module, folder=folder, device=device, wanted=wanted, stored=stored, random_label=label
    )


def fill_structure(
    structure: Structure,
    *,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    is_encoder: bool = False,
    readers: Readers = ALONE,
    loader: str = "auto",
    on_shard: Callable[[int, int], None] = lambda done, total: None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] | None = None,
) -> torch.nn.Module:
    """The component with its values, frozen, each quantised as it arrives: peaks stay near the final size.

    Modules inside those that `elsewhere` names go to the device it gives, each as soon as it is complete;
    values of those on the meta device are not read. Of several `readers` each reads its share of the files
    and sends it to the others: all must call this together.
    `on_shard(done, total)` runs after each shard, `on_bytes(done, total)` after each tensor, in bytes of all
    shards; both may raise to stop. `loader` is the plan's, and `say` is told how each shard is read and why.
    Files of what `is_encoder` may hold more than the model has, as `from_pretrained` of both libraries
    allows, and lack its head. Raises AccessError where the files do not match the model.
    """
    if not structure.wanted:
        on_shard(1, 1)
        return structure.module.requires_grad_(False)
    inside = {
        f"{name}.{inner}".removesuffix("."): device
        for name, device in elsewhere.items()
        for inner, _ in structure.module.get_submodule(name).named_modules()
    }
    if structure.random_label:
        draw(structure, inside)
        on_shard(1, 1)
    else:
        with ShardReader(structure.device, loader=loader, say=say) as reader:
            placing = _Placing(structure, inside, readers, is_encoder=is_encoder)
            _read_shards(structure, reader, placing, on_shard=on_shard, on_bytes=on_bytes)
    return structure.complete(inside, unused=UNUSED_HEAD if is_encoder else None)


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a component in the order of their names; AccessError where any is missing."""
    found = weight_files(folder)
    if found.state != "complete":
        raise AccessError(
            found.lacking,
            where=str(folder),
            remedy="run `trainer fetch CONFIG`, or convert the model to safetensors",
        )
    return list(found.files)


def _read_shards(
    structure: Structure,
    reader: ShardReader,
    placing: _Placing,
    *,
    on_shard: Callable[[int, int], None],
    on_bytes: Callable[[int, int], None],
) -> None:
    """Place every tensor of a component's files; no reference to one outlives its place."""
    from safetensors import SafetensorError

    shards = shard_files(structure.folder)
    sizes = [shard.stat().st_size for shard in shards]
    for number, shard in enumerate(shards):
        try:
            with reader.open(shard, placing.select) as file:
                for key, end in file.ends.items():
                    placing.place(file, key, where=str(shard))
                    on_bytes(sum(sizes[:number]) + end, sum(sizes))
        except SafetensorError as error:
            raise AccessError(
                f"not a readable safetensors file ({error})",
                where=str(shard),
                remedy=to_replace(shard),
            ) from error
        if torch.device(structure.device).type == "cuda":
            # free the holes that full-precision weights left between quantised ones
            torch.cuda.empty_cache()
        on_shard(number + 1, len(shards))


class _Placing:
    """Places the tensors of files in a component; shards may part nf4 bytes from what belongs to them."""

    def __init__(
        self, structure: Structure, elsewhere: Mapping[str, str], readers: Readers, *, is_encoder: bool
    ) -> None:
        self._structure, self._elsewhere, self._is_encoder = structure, elsewhere, is_encoder
        self._readers, self._turns = readers, _Turns(readers)
        self._source: dict[str, int] = {}
        self._rename = renaming(structure.module)
        self._linear_of = {key: linear for linear, keys in structure.stored.items() for key in keys}
        self._parts: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)

    def select(self, sizes: Mapping[str, int]) -> Collection[str]:
        """The tensors of a file that this process reads, out of `sizes`, their bytes by name.

        Must be called for each file once, in one order by all readers, before its tensors are placed.
        """
        own = set()
        for key, size in sizes.items():
            name = self._name(key)
            if name not in self._structure.wanted:
                continue
            if not self._readers.is_parted(name):
                self._source[key] = self._turns.next(size)
                if self._source[key] == self._readers.member:
                    own.add(key)
            elif not self._is_blank(key, name):
                own.add(key)
        return own

    def _name(self, key: str) -> str:
        """The name in the model of what a file's tensor is, or belongs to."""
        linear = self._linear_of.get(key)
        return self._rename(key) if linear is None else f"{linear}.weight"

    def _is_blank(self, key: str, name: str) -> bool:
        """True for values that another rank has: here they have a shape only. The small tensors beside nf4
        bytes say how these are packed, and are read.
        """
        is_small = key in self._linear_of and key != name
        return self._elsewhere.get(name.rpartition(".")[0]) == "meta" and not is_small

    def place(self, file: Shard, key: str, *, where: str) -> None:
        """Place one tensor of a file, or keep it for the others that make up its weight."""
        structure, linear, name = self._structure, self._linear_of.get(key), self._name(key)
        if name not in structure.wanted:
            if not (self._is_encoder or COMPUTED.search(name)):
                raise AccessError(
                    f"tensor {key} does not belong to {type(structure.module).__name__}",
                    where=where,
                    remedy="is this the right model for the configured family?",
                )
            return
        read = file.zeros if self._is_blank(key, name) else file.get_tensor
        if not self._readers.is_parted(name):
            read = functools.partial(self._read_once, file)
        if linear is None:
            structure.place(name, read(key).to(structure.wanted[name].dtype), self._elsewhere, where=where)
            return
        parts = self._parts[name]
        parts[key] = read(key)
        if len(parts) == len(structure.stored[linear]):
            del self._parts[name]
            structure.place(name, parts.pop(name), self._elsewhere, beside=parts, where=where)

    def _read_once(self, file: Shard, key: str) -> torch.Tensor:
        """A tensor that one of the readers reads, and all others get from it."""
        source = self._source[key]
        rows = file.get_tensor(key) if source == self._readers.member else file.zeros(key)
        self._readers.send(rows, source)
        return rows


class _Turns:
    """Whose turn it is to read: runs of neighbours for one process, equal bytes for all in the end."""

    def __init__(self, readers: Readers) -> None:
        self._run_bytes, self._read_bytes = readers.run_bytes, [0] * readers.size
        self._member = self._run = 0

    def next(self, size: int) -> int:
        """The process that reads the next tensor, which has so many bytes."""
        if self._run >= self._run_bytes:
            self._member, self._run = self._read_bytes.index(min(self._read_bytes)), 0
        self._run += size
        self._read_bytes[self._member] += size
        return self._member


def renaming(module: torch.nn.Module) -> Callable[[str], str]:
    """A function from the name of a tensor in a file to its name in the model, which older files differ in.

    transformers' own loader renames so too.
    """
    import transformers

    if not isinstance(module, transformers.PreTrainedModel):
        return str
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [one for one in get_model_conversion_mapping(module) if isinstance(one, WeightRenaming)]
    state, prefix = module.state_dict(), module.base_model_prefix
    return lambda name: str(rename_source_key(name, renamings, [], prefix, state)[0])


def _from_pretrained(component_class: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Both libraries' loader; they name the argument for the type differently.

    Raises AccessError also for tensors that the files lack: the loaders draw them at random, with a warning.
    """
    import transformers
    from safetensors import SafetensorError

    options: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    options["dtype" if issubclass(component_class, transformers.PreTrainedModel) else "torch_dtype"] = dtype
    remedy = "copy the component again; of a download delete what it links to, and run `trainer fetch CONFIG`"
    try:
        module, found = component_class.from_pretrained(folder, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise AccessError(str(error), where=str(folder), remedy=remedy) from error
    missing = sorted(name for name in found["missing_keys"] if not name.startswith(UNUSED_HEAD))
    if missing:
        kind = component_class.__name__
        count = numbered(len(missing), f"tensor of {kind} is", f"tensors of {kind} are")
        raise AccessError(
            f"{count} in none of its files, first {missing[0]}",
            where=str(folder),
            remedy=remedy,
        )
    return module
