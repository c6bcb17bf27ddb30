"""Components before they have values: built from a config on the meta device, linears replaced there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from trainer.errors import AccessError
from trainer.modeling.storage.block_memory import replace_values, without_values
from trainer.modeling.storage.nf4 import Nf4Linear
from trainer.modeling.storage.stored import StoredLinear
from trainer.words.plurals import numbered


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A component made of the layers that it will compute with, whose parameters have no values yet."""

    module: torch.nn.Module
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
        elsewhere: Mapping[str, str],
        *,
        beside: Mapping[str, torch.Tensor] = MappingProxyType({}),
        where: str = "",
    ) -> None:
        """Give the tensor `name` its rows, on their device and in their type.

        The `weight` of a stored layer comes in full precision and is quantised here, or it is nf4 bytes with
        `beside` them whatever else bitsandbytes writes for a weight. A complete module goes to the device
        that `elsewhere` names for it at once. Raises AccessError, whose place is `where`, for rows of another
        shape than the model's.
        """
        owner, _, leaf = name.rpartition(".")
        module, said, shape, state = self.module.get_submodule(owner), "is", tuple(rows.shape), None
        if beside:
            from bitsandbytes.functional import QuantState

            state = QuantState.from_dict(dict(beside), device=rows.device)
            said, shape = "is packed from", tuple(state.shape)
        layer = module if leaf == "weight" and isinstance(module, StoredLinear) else None
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        wanted = tuple(own[leaf].shape) if layer is None else (layer.out_features, layer.in_features)
        if shape != wanted:
            raise AccessError(
                f"tensor {name} {said} {shape}, the model's is {wanted}",
                where=where,
                remedy="is this the right model for the configured family?",
            )
        if state is not None:
            assert isinstance(layer, Nf4Linear), name
            layer.take(rows, state)
        elif layer is not None:
            layer.quantize(rows)
        elif leaf in module._buffers:
            module._buffers[leaf] = rows
        else:
            module.register_parameter(leaf, torch.nn.Parameter(rows, requires_grad=False))
        if owner in elsewhere and not any(one.is_meta for one in module.parameters(recurse=False)):
            move(module, elsewhere[owner])

    def complete(self, elsewhere: Mapping[str, str], *, unused: str | None = None) -> torch.nn.Module:
        """The filled component, frozen, with its buffers where its parameters are.

        Parameters whose names begin with `unused` are zeros where no file holds them. Raises AccessError
        where another one has no values.
        """
        import transformers

        if isinstance(self.module, transformers.PreTrainedModel):
            # weights that the files hold once go to every module that shares them, as from_pretrained does it
            self.module.tie_weights(missing_keys=set(_on_meta(self.module)), recompute_mapping=False)
        if unused is not None:
            for name in [one for one in _on_meta(self.module) if one.startswith(unused)]:
                wanted = self.wanted[name]
                self.place(name, torch.zeros(wanted.shape, dtype=wanted.dtype, device=self.device), elsewhere)
        missing = [name for name in _on_meta(self.module) if elsewhere.get(name.rpartition(".")[0]) != "meta"]
        if missing:
            which = numbered(len(missing), "tensor of the model is", "tensors of the model are")
            raise AccessError(
                f"{which} in none of its files, first {missing[0]}",
                where=str(self.folder),
                remedy="the download may be incomplete: run `trainer fetch CONFIG` again",
            )
        for name, module in self.module.named_modules():
            if name not in elsewhere:
                move(module, self.device)
        return self.module.requires_grad_(False)


def built(component_class: Any, folder: Path) -> torch.nn.Module:
    """The component as its config.json says, on torch's current default device, without attention dropout."""
    import transformers

    if not issubclass(component_class, transformers.PreTrainedModel):
        module: torch.nn.Module = component_class.from_config(component_class.load_config(folder))
        return module
    # its masks would be other ones in a step that is done again, and where a block is recomputed
    config = component_class.config_class.from_pretrained(folder, attention_dropout=0.0)
    model: Any = component_class(config)
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

    So do rope tables of transformers' models, and parameters that a class of either library keeps in fp32: T5
    the last projection of its MLPs in fp16, where its outputs overflow.
    """
    import transformers

    if isinstance(module, transformers.PreTrainedModel):
        tensors = dict(module.named_parameters())
        kept = "|".join(pattern.replace("*", ".*") for pattern in module._get_dtype_plan(dtype))
    else:
        tensors = module.state_dict(keep_vars=True)
        words = "|".join(map(re.escape, module._keep_in_fp32_modules or ()))
        kept = rf"(^|\.)({words})(\.|$)" if words else ""
    in_fp32 = re.compile(kept or "(?!)")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if in_fp32.search(name) else dtype)


def tied(module: torch.nn.Module) -> Mapping[str, str]:
    """Tensors that get another's values, and which."""
    import transformers

    return module.all_tied_weights_keys if isinstance(module, transformers.PreTrainedModel) else {}


def _on_meta(module: torch.nn.Module) -> list[str]:
    """Parameters without values."""
    return [name for name, one in module.named_parameters(remove_duplicate=False) if one.is_meta]


def move(module: torch.nn.Module, device: str) -> None:
    """A module's own tensors, without its children's. A shared parameter stays shared, a buffer does not."""
    for parameter in module.parameters(recurse=False):
        if device == "meta":
            replace_values(parameter, without_values(parameter))
        else:
            parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)
