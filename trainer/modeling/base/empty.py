"""Models before they have values: built from a config, and what their modules and tensors are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import torch

Waiting = Callable[[torch.nn.Module], Sequence[str]]
"""Names of the modules of an empty model whose values are to stay in host memory."""


def built(component_class: Any, folder: Path) -> torch.nn.Module:
    """The component as its config.json says, on torch's current default device."""
    import transformers

    if not issubclass(component_class, transformers.PreTrainedModel):
        module: torch.nn.Module = component_class.from_config(component_class.load_config(folder))
        return module
    config = component_class.config_class.from_pretrained(folder)
    model: Any = component_class(config)
    if (folder / "generation_config.json").is_file():
        # where its answers end
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def built_empty(component_class: Any, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The component with parameters on the meta device, in their types, and buffers computed on the CPU."""
    import transformers
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        module = built(component_class, folder)
    if not isinstance(module, transformers.PreTrainedModel):
        cast(module, dtype)
    return module


def cast(module: Any, dtype: torch.dtype) -> None:
    """Give a diffusers model its types; tables that no file holds stay fp32, as in its own loader."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(stored_type(module, name, dtype))


def stored_type(module: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """Type of one tensor of a model: some classes of diffusers say what they compute in fp32 always."""
    import transformers

    kept = () if isinstance(module, transformers.PreTrainedModel) else module._keep_in_fp32_modules or ()
    return dtype if set(kept).isdisjoint(name.split(".")) else torch.float32


def tied(module: torch.nn.Module) -> frozenset[str]:
    """Modules whose weight is another's too."""
    import transformers

    if not isinstance(module, transformers.PreTrainedModel):
        return frozenset()
    names = (*module.all_tied_weights_keys.keys(), *module.all_tied_weights_keys.values())
    return frozenset(name.rpartition(".")[0] for name in names)


def tie(module: torch.nn.Module) -> None:
    """Give weights that the files hold once to every module that shares them, as from_pretrained does."""
    import transformers

    if isinstance(module, transformers.PreTrainedModel):
        module.tie_weights(missing_keys=set(on_meta(module)), recompute_mapping=False)


def on_meta(module: torch.nn.Module) -> list[str]:
    """Parameters without values."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in parameters if parameter.device.type == "meta"]


def swap(module: torch.nn.Module, name: str, replacement: torch.nn.Module | None) -> None:
    """Put `replacement`, where there is one, in the place of a named submodule."""
    if replacement is not None:
        parent, _, attribute = name.rpartition(".")
        module.get_submodule(parent).register_module(attribute, replacement)


def linears(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Plain linear layers by name; one that was replaced meanwhile is left out of what follows."""
    # by name: a list of the modules would keep every replaced one in memory
    names = [name for name, child in module.named_modules() if type(child) is torch.nn.Linear]
    for name in names:
        child = module.get_submodule(name)
        assert isinstance(child, torch.nn.Linear)
        yield name, child


def modules_inside(module: torch.nn.Module, waiting: Waiting | None) -> frozenset[str]:
    """Names of the modules that `waiting` gives, and of all inside them."""
    outer = waiting(module) if waiting is not None else ()
    return frozenset(
        f"{name}.{inner}".removesuffix(".") for name in outer for inner, _ in _named(module, name)
    )


def to_host(module: torch.nn.Module, name: str) -> None:
    """Move a submodule's own tensors to the CPU, if it has values for all of its parameters."""
    child = module.get_submodule(name)
    parameters = list(child.parameters(recurse=False))
    if all(parameter.device.type != "meta" for parameter in parameters):
        _move(child, "cpu")


def to_device(module: torch.nn.Module, device: str, waiting: Set[str] = frozenset()) -> torch.nn.Module:
    """Move all tensors but those of the modules that wait."""
    if not waiting:
        return module.to(device)
    for name, child in module.named_modules():
        if name not in waiting:
            _move(child, device)
    return module


def _named(module: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    return module.get_submodule(name).named_modules()


def _move(module: torch.nn.Module, device: str) -> None:
    """A module's own tensors, without its children's. A shared parameter stays shared, a buffer does not."""
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)
