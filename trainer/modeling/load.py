"""Floor 4: components of a base model: from shards on disk, streamed tensor by tensor, or seeded random
weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.errors import AccessError
from trainer.hardware.geometry import packed_tensors, stored_as
from trainer.modeling.quantize import Replace, packed_linear
from trainer.modeling.source import ModelSource

# buffers that older files hold and newer models compute; transformers' own loader skips the same
_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$")


def load_component(
    component_class: Any, source: ModelSource, name: str, *, device: str, dtype: torch.dtype
) -> Any:
    """One component through its own library's `from_pretrained`, or built from its config with seeded
    weights.
    """
    if name in source.random_components:
        module = _random_module(component_class, source, name, device=device, dtype=dtype)
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
) -> torch.nn.Module:
    """Build on the meta device, then fill shard by shard on `device`, replacing linears as they complete.

    Peaks stay near the final size: a quantised model never exists in full precision. A checkpoint that is
    stored in nf4 is filled as it is, and `replace` not asked. `on_shard(done, total)` runs after each shard
    and may raise to stop. With `fill_zeros` the matrices that a random base starts with at zero get values:
    an adapter beside a gate that is closed would learn nothing. Raises AccessError where the files do not
    match the model.
    """
    if name in source.random_components:
        module = _random_module(component_class, source, name, device=device, dtype=dtype)
        if fill_zeros:
            _fill_zeros(module, f"{source.seed}/{name}/zeros", device)
        on_shard(1, 1)
        if replace is not None:
            kept = _tied(module)
            for linear_name, linear in _linears(module):
                if linear_name not in kept:
                    _swap(module, linear_name, replace(linear_name, linear))
                del linear
        return module.requires_grad_(False)
    folder = source.component(name)
    filling = _filling(component_class, folder, device=device, dtype=dtype, replace=replace)
    shards = shard_files(folder)
    for number, shard in enumerate(shards):
        _fill(filling, shard)
        on_shard(number + 1, len(shards))
    module = filling.module
    _tie(module)
    missing = _on_meta(module)
    if missing:
        raise AccessError(
            f"{len(missing)} tensors of the model are in none of its files, first {missing[0]}",
            where=str(folder),
            remedy="the download may be incomplete: run `trainer fetch` again",
        )
    # rope tables and other buffers were computed on the CPU
    return module.to(device).requires_grad_(False)


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a component in the order of their names."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        weight_map = json.loads(indexes[0].read_text())["weight_map"]
        return [folder / file for file in sorted(set(weight_map.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise AccessError(
            "no .safetensors file",
            where=str(folder),
            remedy="run `trainer fetch`, or convert the model to safetensors",
        )
    return files


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
    device: str
    dtype: torch.dtype
    replace: Replace | None
    waiting: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Packed tensors by linear until all are there: shards may part them."""


def _filling(
    component_class: Any, folder: Path, *, device: str, dtype: torch.dtype, replace: Replace | None
) -> _Filling:
    """The component on the meta device, with its buffers computed on the CPU."""
    import transformers
    from accelerate import init_empty_weights

    packed = packed_tensors(folder) if stored_as(folder) else {}
    with init_empty_weights(include_buffers=False):
        module = _built(component_class, folder)
    known = frozenset(module.state_dict())
    if isinstance(module, transformers.PreTrainedModel):
        # its rope tables stay in fp32
        parameters = frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))
    else:
        _cast(module, dtype)
        parameters = known
    return _Filling(
        module=module,
        known=known,
        parameters=parameters,
        kept=_tied(module),
        packed={tensor: linear for linear, tensors in packed.items() for tensor in tensors},
        pieces={linear: len(tensors) for linear, tensors in packed.items()},
        device=device,
        dtype=dtype,
        replace=None if packed else replace,
    )


def _fill(filling: _Filling, shard: Path) -> None:
    """Place one shard's tensors and replace every linear that became complete."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, framework="pt", device=filling.device) as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                linear = filling.packed.get(key)
                name = key if linear is None else f"{linear}.weight"
                if name not in filling.known and _COMPUTED.search(name):
                    continue
                if name not in filling.known:
                    raise AccessError(
                        f"tensor {key} does not belong to {type(filling.module).__name__}",
                        where=str(shard),
                        remedy="is this the right model for the configured family?",
                    )
                if linear is None:
                    _place(filling, key, file)
                else:
                    _place_packed(filling, key, linear, file, shard)
    except SafetensorError as error:
        raise AccessError(
            f"not a readable safetensors file ({error})",
            where=str(shard),
            remedy="delete it and run `trainer fetch`",
        ) from error


def _place(filling: _Filling, key: str, file: Any) -> None:
    """One tensor; no reference to it outlives its replacement."""
    from accelerate.utils import set_module_tensor_to_device

    dtype = _type(filling.module, key, filling.dtype) if key in filling.parameters else None
    value = file.get_tensor(key)
    set_module_tensor_to_device(filling.module, key, filling.device, value=value, dtype=dtype)
    del value
    owner = key.rpartition(".")[0]
    if filling.replace is not None and owner not in filling.kept:
        _replace_if_complete(filling.module, owner, filling.replace)


def _place_packed(filling: _Filling, key: str, linear: str, file: Any, shard: Path) -> None:
    """One tensor of an nf4 weight, which takes its place with the last of them."""
    tensors = filling.waiting.setdefault(linear, {})
    tensors[key] = file.get_tensor(key)
    if len(tensors) < filling.pieces[linear]:
        return
    del filling.waiting[linear]
    module = filling.module.get_submodule(linear)
    assert isinstance(module, torch.nn.Linear), linear
    packed = packed_linear(linear, module, tensors, filling.device, filling.dtype, where=str(shard))
    _swap(filling.module, linear, packed)


def _replace_if_complete(module: torch.nn.Module, name: str, replace: Replace) -> None:
    child = module.get_submodule(name)
    if isinstance(child, torch.nn.Linear) and all(p.device.type != "meta" for p in child.parameters()):
        _swap(module, name, replace(name, child))


def _tied(module: torch.nn.Module) -> frozenset[str]:
    """Modules whose weight is another's too."""
    import transformers

    if not isinstance(module, transformers.PreTrainedModel):
        return frozenset()
    names = (*module.all_tied_weights_keys.keys(), *module.all_tied_weights_keys.values())
    return frozenset(name.rpartition(".")[0] for name in names)


def _tie(module: torch.nn.Module) -> None:
    """Give weights that the files hold once to every module that shares them, as from_pretrained does."""
    import transformers

    if isinstance(module, transformers.PreTrainedModel):
        module.tie_weights(missing_keys=set(_on_meta(module)), recompute_mapping=False)


def _on_meta(module: torch.nn.Module) -> list[str]:
    """Parameters without values."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in parameters if parameter.device.type == "meta"]


def _swap(module: torch.nn.Module, name: str, replacement: torch.nn.Module | None) -> None:
    if replacement is not None:
        parent, _, attribute = name.rpartition(".")
        module.get_submodule(parent).register_module(attribute, replacement)


def _linears(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    # by name: a list of the modules would keep every replaced one in memory
    names = [name for name, child in module.named_modules() if type(child) is torch.nn.Linear]
    for name in names:
        child = module.get_submodule(name)
        assert isinstance(child, torch.nn.Linear)
        yield name, child


def _from_pretrained(component_class: Any, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Both libraries' loader; they name the argument for the type differently."""
    import transformers

    options: dict[str, Any] = {"use_safetensors": True, "local_files_only": True}
    options["dtype" if issubclass(component_class, transformers.PreTrainedModel) else "torch_dtype"] = dtype
    try:
        module: torch.nn.Module = component_class.from_pretrained(folder, **options)
    except OSError as error:
        raise AccessError(
            str(error), where=str(folder), remedy="run `trainer fetch` to complete the model"
        ) from error
    return module


def _random_module(
    component_class: Any, source: ModelSource, name: str, *, device: str, dtype: torch.dtype
) -> torch.nn.Module:
    """The component with its library's own initialisation, built on the device, seeded by run seed and
    name.
    """
    import transformers

    from trainer.modeling.seeds import seeded

    folder = source.component(name)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with seeded(f"{source.seed}/{name}", device), torch.device(device):
            module = _built(component_class, folder)
    finally:
        torch.set_default_dtype(default)
    if not issubclass(component_class, transformers.PreTrainedModel):
        _cast(module, dtype)
        return module.to(device)
    # its rope tables stay in fp32
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module.to(device)


def _fill_zeros(module: torch.nn.Module, label: str, device: str) -> None:
    """Draw every linear layer's all-zero weight from a normal distribution of 0.02."""
    from trainer.modeling.seeds import seeded

    with seeded(label, device), torch.no_grad():
        for _, linear in _linears(module):
            if not bool(linear.weight.any()):
                linear.weight.normal_(std=0.02)


def _cast(module: Any, dtype: torch.dtype) -> None:
    """Give a diffusers model its types; tables that no file holds stay fp32, as in its own loader."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(_type(module, name, dtype))


def _type(module: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """Type of one tensor of a diffusers model: some classes say what they compute in fp32 always."""
    import transformers

    kept = () if isinstance(module, transformers.PreTrainedModel) else module._keep_in_fp32_modules or ()
    return dtype if set(kept).isdisjoint(name.split(".")) else torch.float32


def _built(component_class: Any, folder: Path) -> torch.nn.Module:
    """The component as its config.json says, on torch's current default device."""
    import transformers

    if not issubclass(component_class, transformers.PreTrainedModel):
        built: torch.nn.Module = component_class.from_config(component_class.load_config(folder))
        return built
    config = component_class.config_class.from_pretrained(folder)
    module: Any = component_class(config)
    if (folder / "generation_config.json").is_file():
        # where its answers end
        module.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return module
