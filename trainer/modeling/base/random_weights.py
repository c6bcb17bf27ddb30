"""Components with seeded random weights, for training from nothing and for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.modeling.base.structure import Structure, built, cast, move, tied
from trainer.modeling.seeds import seeded

Absent = Callable[[torch.nn.Module], Collection[str]]
"""From a component without values to the names of its modules whose values another process has."""


def random_module(
    component_class: Any,
    folder: Path,
    label: str,
    *,
    device: str,
    dtype: torch.dtype,
    fill_zeros: bool,
    absent: Absent | None = None,
) -> torch.nn.Module:
    """The component with its library's own initialisation, built on the device, seeded by `label`.

    With `fill_zeros` the matrices that it starts with at zero get values. Modules that are `absent` lose
    theirs as soon as they are drawn, where their library draws each once: those of the others are what they
    are in a whole component.
    """
    zeros, default = set[torch.nn.Linear](), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        gone, is_gone = _drawn_once(component_class, folder, absent)

        def drop(module: torch.nn.Module) -> None:
            if next(is_gone, False):
                if type(module) is torch.nn.Linear and not module.weight.is_meta and not module.weight.any():
                    zeros.add(module)
                move(module, "meta")

        with seeded(label, device), torch.device(device), _registering(drop):
            module = built(component_class, folder)
    finally:
        torch.set_default_dtype(default)
    cast(module, dtype)
    if fill_zeros:
        with seeded(f"{label}/zeros", device), torch.no_grad():
            for linear in module.modules():
                if linear in zeros:  # what comes after it gets the values that it has in a whole component
                    torch.empty_like(linear.weight, device=device).normal_(std=0.02)
                elif type(linear) is torch.nn.Linear and not (linear.weight.is_meta or linear.weight.any()):
                    linear.weight.normal_(std=0.02)
    for name, inner in module.named_modules():
        if name not in gone:
            move(inner, device)
    return module


def _drawn_once(
    component_class: Any, folder: Path, absent: Absent | None
) -> tuple[frozenset[str], Iterator[bool]]:
    """Names of the absent modules, and for each module, as they are registered, whether it is one of them.

    None of a component that reads or changes an absent module after it was made: what follows could be drawn
    from another state.
    """
    import transformers

    # transformers initialises its models as wholes
    if absent is None or issubclass(component_class, transformers.PreTrainedModel):
        return frozenset(), iter(())
    order, used = list[torch.nn.Module](), dict[StorageWeakRef, int]()

    class Watch(TorchDispatchMode):
        """Notes how many modules were registered when a tensor was last read or written."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, torch.Tensor):
                    used[StorageWeakRef(one.untyped_storage())] = len(order)
            return func(*args, **(kwargs or {}))

    with _registering(order.append), torch.device("meta"), Watch():
        empty = built(component_class, folder)
    gone, names = frozenset(absent(empty)), {module: name for name, module in empty.named_modules()}
    absents = [names.get(module, "") in gone for module in order]
    for place, (module, away) in enumerate(zip(order, absents, strict=True)):
        storages = [StorageWeakRef(one.untyped_storage()) for one in module.parameters(recurse=False)]
        if away and any(used.get(storage, 0) > place for storage in storages):
            return frozenset(), iter(())
    return gone, iter(absents)


@contextmanager
def _registering(call: Callable[[torch.nn.Module], object]) -> Iterator[None]:
    """Call with each module that another one gets as its own, in the order of their making."""

    def hook(owner: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
        if module is not None:
            call(module)

    handle = register_module_module_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def draw(structure: Structure, elsewhere: Mapping[str, str]) -> None:
    """Fill a structure layer by layer: its linears are quantised before the next one is drawn.

    Peaks stay near the final size. Values are not those of `random_module`: a library's initialisation wants
    the whole model. Matrices are drawn as torch draws linear layers, scales are 1, biases 0.
    """
    with seeded(structure.random_label, structure.device):
        for owner, module in structure.module.named_modules():
            for leaf, _ in list(module.named_parameters(recurse=False)):
                name = f"{owner}.{leaf}".removeprefix(".")
                if name in tied(structure.module):
                    continue
                wanted = structure.wanted[name]
                drawn = torch.empty_like(wanted, device=structure.device)
                if wanted.ndim < 2:
                    drawn.fill_(1.0 if leaf == "weight" else 0.0)
                else:
                    bound = wanted.shape[1:].numel() ** -0.5
                    drawn.uniform_(-bound, bound)
                structure.place(name, drawn, elsewhere)
                del drawn
