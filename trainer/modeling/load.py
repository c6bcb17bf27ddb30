"""Floor 4: components of a base model: from shards on disk, streamed tensor by tensor, or seeded random
weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.errors import AccessError
from trainer.modeling.source import ModelSource

Replace = Callable[[str, torch.nn.Module], torch.nn.Module | None]
"""Given a loaded linear's name and module, its replacement or None; called as soon as its tensors are
there.
"""


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
) -> torch.nn.Module:
    """Build on the meta device, then fill shard by shard on `device`, replacing linears as they complete.

    Peaks stay near the final size: a quantised model never exists in full precision. `on_shard(done, total)`
    runs
    after each shard and may raise to stop. Raises AccessError where the files do not match the model.
    """
    if name in source.random_components:
        module = _random_module(component_class, source, name, device=device, dtype=dtype)
        on_shard(1, 1)
        if replace is not None:
            for linear_name, linear in _linears(module):
                _swap(module, linear_name, replace(linear_name, linear))
                del linear
        return module.requires_grad_(False)
    from accelerate import init_empty_weights

    folder = source.component(name)
    with init_empty_weights(include_buffers=False):
        module = component_class.from_config(component_class.load_config(folder))
    module = module.to(dtype)
    shards = shard_files(folder)
    for number, shard in enumerate(shards):
        _fill(module, shard, device=device, dtype=dtype, replace=replace)
        on_shard(number + 1, len(shards))
    missing = [key for key, tensor in module.state_dict().items() if tensor.device.type == "meta"]
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


def _fill(
    module: torch.nn.Module, shard: Path, *, device: str, dtype: torch.dtype, replace: Replace | None
) -> None:
    """Place one shard's tensors and replace every linear that became complete."""
    from accelerate.utils import set_module_tensor_to_device
    from safetensors import SafetensorError, safe_open

    known = set(module.state_dict())
    try:
        with safe_open(shard, framework="pt", device=device) as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                if key not in known:
                    raise AccessError(
                        f"tensor {key} does not belong to {type(module).__name__}",
                        where=str(shard),
                        remedy="is this the right model for the configured family?",
                    )
                value = file.get_tensor(key)
                set_module_tensor_to_device(module, key, device, value=value, dtype=dtype)
                if replace is not None:
                    owner = key.rpartition(".")[0]
                    _replace_if_complete(module, owner, replace)
    except SafetensorError as error:
        raise AccessError(
            f"not a readable safetensors file ({error})",
            where=str(shard),
            remedy="delete it and run `trainer fetch`",
        ) from error


def _replace_if_complete(module: torch.nn.Module, name: str, replace: Replace) -> None:
    child = module.get_submodule(name)
    if isinstance(child, torch.nn.Linear) and all(p.device.type != "meta" for p in child.parameters()):
        _swap(module, name, replace(name, child))


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
            if issubclass(component_class, transformers.PreTrainedModel):
                config = component_class.config_class.from_pretrained(folder)
                module: torch.nn.Module = component_class(config)
            else:
                module = component_class.from_config(component_class.load_config(folder))
    finally:
        torch.set_default_dtype(default)
    return module.to(device=device, dtype=dtype)
