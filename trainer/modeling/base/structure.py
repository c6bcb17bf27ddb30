"""Components before they have values: built from a config on the meta device, linears replaced there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from trainer.errors import AccessError
from trainer.modeling.storage.quantize import fill


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A component made of the layers that it will compute with, whose parameters have no values yet."""

    module: Any
    folder: Path
    device: str
    """Device on which values are quantised and stay."""
    wanted: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Its tensors as files may hold them, on the meta device, in the types that they are to have."""
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the tensors that make up a weight that the files hold as nf4 bytes, by its linear."""
    random_label: str = ""
    """Names the random state that values are drawn with; empty where files hold them."""

    def place(
        self,
        name: str,
        rows: torch.Tensor,
        on_host: Set[str],
        *,
        beside: Mapping[str, torch.Tensor] = MappingProxyType({}),
        where: str = "",
    ) -> None:
        """`fill` one tensor. A complete module whose name is in `on_host` leaves the device at once."""
        owner = name.rpartition(".")[0]
        module = self.module.get_submodule(owner)
        fill(name, module, rows, beside=beside, where=where)
        if owner in on_host and not any(one.is_meta for one in module.parameters(recurse=False)):
            move(module, "cpu")

    def complete(self, on_host: Set[str]) -> torch.nn.Module:
        """The filled component, frozen, with its buffers where its parameters are.

        Raises AccessError where a parameter has no values.
        """
        import transformers

        if isinstance(self.module, transformers.PreTrainedModel):
            # weights that the files hold once go to every module that shares them, as from_pretrained does it
            self.module.tie_weights(missing_keys=set(_on_meta(self.module)), recompute_mapping=False)
        missing = _on_meta(self.module)
        if missing:
            raise AccessError(
                f"{len(missing)} tensors of the model are in none of its files, first {missing[0]}",
                where=str(self.folder),
                remedy="the download may be incomplete: run `trainer fetch` again",
            )
        for name, module in self.module.named_modules():
            if name not in on_host:
                move(module, self.device)
        frozen: torch.nn.Module = self.module.requires_grad_(False)
        return frozen


def built(component_class: Any, folder: Path) -> torch.nn.Module:
    """The component as its config.json says, on torch's current default device."""
    import transformers

    if not issubclass(component_class, transformers.PreTrainedModel):
        module: torch.nn.Module = component_class.from_config(component_class.load_config(folder))
        return module
    model: Any = component_class(component_class.config_class.from_pretrained(folder))
    if (folder / "generation_config.json").is_file():
        # where its answers end
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def built_empty(component_class: Any, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The component with parameters on the meta device, in their types, and buffers computed on the CPU."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        module = built(component_class, folder)
    cast(module, dtype)
    return module


def cast(module: Any, dtype: torch.dtype) -> None:
    """Give a component its types; tables that no file holds stay fp32, as in its library's own loader.

    So do rope tables of transformers' models, and what some classes of diffusers compute in fp32 always.
    """
    import transformers

    if isinstance(module, transformers.PreTrainedModel):
        tensors, kept = dict(module.named_parameters()), set()
    else:
        tensors, kept = module.state_dict(keep_vars=True), set(module._keep_in_fp32_modules or ())
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype if kept.isdisjoint(name.split(".")) else torch.float32)


def tied(module: torch.nn.Module) -> Mapping[str, str]:
    """Tensors that get another's values, and which."""
    import transformers

    return module.all_tied_weights_keys if isinstance(module, transformers.PreTrainedModel) else {}


def _on_meta(module: torch.nn.Module) -> list[str]:
    """Parameters without values."""
    return [name for name, one in module.named_parameters(remove_duplicate=False) if one.is_meta]


def modules_inside(module: torch.nn.Module, outer: Collection[str]) -> frozenset[str]:
    """Names of the modules that `outer` names, and of all inside them."""
    return frozenset(
        f"{name}.{inner}".removesuffix(".")
        for name in outer
        for inner, _ in module.get_submodule(name).named_modules()
    )


def move(module: torch.nn.Module, device: str) -> None:
    """A module's own tensors, without its children's. A shared parameter stays shared, a buffer does not."""
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)
