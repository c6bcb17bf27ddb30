"""Layers of a model that are given the same input: finding them, and one computation for all of them.

Such a group computes when its first layer is called; the others hand out what was computed then. Its weights
become views of one, so that they keep their names and each can be read and written by itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(kw_only=True)
class Group:
    """State of the layers of one input. They are called in order, and the first computes for all."""

    members: tuple[Any, ...]
    sizes: list[int]
    """Values of a member's output."""
    pending: tuple[torch.Tensor, ...] | None = None
    """Outputs that were computed and not asked for yet."""
    inputs: torch.Tensor | None = None
    """Their input."""

    def output(self, place: int, inputs: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
        """The output of the member at `place`; the first one gives all outputs beside each other, `whole`."""
        if whole is not None:
            self.pending, self.inputs = whole.split(self.sizes, dim=-1), inputs
        assert self.pending is not None, "layers of one input are called in another order"
        assert self.inputs is inputs, "layers of one input are given different ones"
        output = self.pending[place]
        if place == len(self.members) - 1:
            self.pending = self.inputs = None
        return output


def same_inputs(
    model: torch.nn.Module, run: Callable[[], object], kinds: Collection[type]
) -> list[list[str]]:
    """Names of the layers of exactly these classes by the input that `run`, one forward pass of the model,
    gives them, in the order of their calls; none of a layer called twice.
    """
    # weak references: the inputs of all layers at once would be gigabytes
    inputs: dict[int, tuple[weakref.ref[torch.Tensor], list[str]]] = {}
    groups: list[list[str]] = []
    counts: dict[str, int] = {}
    handles = []

    def note(name: str, module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        counts[name] = counts.get(name, 0) + 1
        if not arguments:  # its input has a name
            return
        known, names = inputs.get(id(arguments[0]), (None, []))
        if known is None or known() is not arguments[0]:
            names = []
            groups.append(names)
            inputs[id(arguments[0])] = weakref.ref(arguments[0]), names
        names.append(name)

    for name, module in model.named_modules():
        if type(module) in kinds:
            handles.append(module.register_forward_pre_hook(functools.partial(note, name)))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [group for group in groups if all(counts[name] == 1 for name in group)]


def become_members(layers: Sequence[Any], kind: type) -> None:
    """Make the layers a group: `kind`, a subclass of theirs, becomes their class, and reads `shared`, the
    `Group`, and their `place` in it.
    """
    shared = Group(members=tuple(layers), sizes=[layer.out_features for layer in layers])
    for place, layer in enumerate(layers):
        layer.__class__ = kind
        # not through the module's own assignment, which would make the group's layers children of each other
        object.__setattr__(layer, "shared", shared)
        object.__setattr__(layer, "place", place)


def in_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors under each other in one; each becomes a view of its part."""
    whole = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = part
    return whole
