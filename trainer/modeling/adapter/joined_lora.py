"""LoRA layers that are given the same input, computed as one: query, key and value of an attention.

One product with a wide weight is faster than three with narrow ones, their adapters' first halves are one
product too, and in FP8 the input is quantised once. The layers stay what they are: their weights become
views of the wide one, their adapters keep their names, and `part_siblings` makes them single again. A layer
without siblings adds its adapter's product in one pass over its output.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear

from trainer.modeling.adapter.lora import ADAPTER
from trainer.modeling.adapter.low_rank import add_low_rank
from trainer.modeling.storage.row_quantized import RowScaledLinear, row_scaled

# buffers of a group's first layer
_JOINT = ("joint_weight", "joint_bias", "joint_scale", "joint_transposed")

Parts = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]
"""The bases' outputs beside each other (..., all), and what the adapters add to them, as `add_low_rank` takes
it: hidden (..., all ranks), and `ups`.
"""


@dataclass(kw_only=True)
class _Shared:
    """State of one group of layers. They are called in order, and the first computes for all."""

    members: tuple[Any, ...]
    sizes: list[int]
    scaling: float
    pending: tuple[torch.Tensor, ...] | None = None
    """Outputs that were computed and not asked for yet."""


class _Member(LoraLinear):
    """A LoRA layer of a group. It is assigned as the class of a layer, never constructed."""

    shared: _Shared
    place: int

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute peft's forward pass, for all members when the first one is called."""
        shared = self.shared
        if not _is_active(self):
            return super().forward(x, *args, **kwargs)
        if self.place == 0:
            whole, hidden, ups = _parts(shared, x)
            shared.pending = add_low_rank(whole, hidden, *ups).split(shared.sizes, dim=-1)
        assert shared.pending is not None, "layers of one input are called in another order"
        output = shared.pending[self.place]
        if self.place == len(shared.members) - 1:
            shared.pending = None
        return output


class _Single(LoraLinear):
    """A LoRA layer without a group. Like `_Member` it is assigned as a class, never constructed."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute peft's forward pass."""
        if not _is_active(self):
            return super().forward(x, *args, **kwargs)
        layer: Any = self
        whole = layer.base_layer(x)
        down = _scaled(layer.lora_A[ADAPTER].weight, layer.scaling[ADAPTER])
        hidden = torch.nn.functional.linear(x, down)
        return add_low_rank(whole, hidden, layer.lora_B[ADAPTER].weight)


def joined_parts(layers: tuple[Any, ...], inputs: torch.Tensor) -> Parts | None:
    """The outputs of `layers` by one product where they are one group, and what their adapters add to it.

    None where they are not all layers of a group in their order, differ in size, or do not add their adapter.
    """
    if not all(isinstance(layer, _Member) and _is_active(layer) for layer in layers):
        return None
    shared = layers[0].shared
    if len(shared.members) != len(layers) or len(set(shared.sizes)) > 1:
        return None
    if any(layer is not own for layer, own in zip(layers, shared.members, strict=True)):
        return None
    return _parts(shared, inputs)


def join_siblings(model: torch.nn.Module, run: Callable[[], object]) -> int:
    """Join all LoRA layers that `run`, one forward pass of the model, gives the same input; their number.

    Layers are joined where they have one parent, follow each other, and store their weight in one way. The
    others, which are not counted, add their adapters in one pass.
    """
    joined = 0
    for names in _same_inputs(model, run):
        by_parent: dict[str, list[Any]] = {}
        for name in names:
            by_parent.setdefault(name.rpartition(".")[0], []).append(model.get_submodule(name))
        for together in by_parent.values():
            if len(together) > 1 and _alike(together):
                _join(together)
                joined += len(together)
    for module in model.modules():
        if type(module) is LoraLinear and _is_plain(module):
            single: Any = module
            single.__class__ = _Single
    return joined


def part_siblings(model: torch.nn.Module) -> None:
    """Make every layer a plain one again; weights stay where they are."""
    for module in model.modules():
        if isinstance(module, _Member):
            if module.place == 0:
                for name in _JOINT:
                    delattr(module, name)
            del module.shared, module.place
        if isinstance(module, _Member | _Single):
            plain: Any = module
            plain.__class__ = LoraLinear


def _same_inputs(model: torch.nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Names of LoRA layers by input, in the order of their calls; none of a layer called twice."""
    # weak references: the inputs of all layers at once would be gigabytes
    inputs: dict[int, tuple[weakref.ref[torch.Tensor], list[str]]] = {}
    groups: list[list[str]] = []
    counts: dict[str, int] = {}
    handles = []

    def note(name: str, module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        counts[name] = counts.get(name, 0) + 1
        known, names = inputs.get(id(arguments[0]), (None, []))
        if known is None or known() is not arguments[0]:
            names = []
            groups.append(names)
            inputs[id(arguments[0])] = weakref.ref(arguments[0]), names
        names.append(name)

    for name, module in model.named_modules():
        if type(module) in (LoraLinear, _Single):
            handles.append(module.register_forward_pre_hook(functools.partial(note, name)))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [group for group in groups if all(counts[name] == 1 for name in group)]


def _alike(layers: list[Any]) -> bool:
    """True where the weights can be one: same kind of layer, dtype, adapter scale and presence of biases."""
    kinds = {_kind(layer) for layer in layers}
    known = next(iter(kinds))[0] in (torch.nn.Linear, RowScaledLinear)
    return len(kinds) == 1 and known and all(_is_plain(layer) for layer in layers)


def _is_plain(layer: Any) -> bool:
    """True for an adapter of two products in the base's dtype: no dropout, no variant such as DoRA."""
    types = {layer.lora_A[ADAPTER].weight.dtype, torch.uint8}  # bytes are unpacked to any type
    plain = type(layer.lora_dropout[ADAPTER]) is torch.nn.Identity and ADAPTER not in layer.lora_variant
    return plain and layer.base_layer.weight.dtype in types


def _kind(layer: Any) -> tuple[Any, ...]:
    base = layer.base_layer
    stored = (base.kind, base.fp8_compute) if isinstance(base, RowScaledLinear) else ()
    return (type(base), base.weight.dtype, base.bias is None, layer.scaling[ADAPTER], *stored)


def _join(layers: list[Any]) -> None:
    bases = [layer.base_layer for layer in layers]
    sizes = [base.out_features for base in bases]
    weight, scale, transposed = _one([base.weight for base in bases]), None, None
    bias = None if bases[0].bias is None else _one([base.bias for base in bases])
    if isinstance(bases[0], RowScaledLinear):
        scale = _one([base.weight_scale for base in bases])
        if bases[0].transposed is not None:
            transposed = torch.cat([base.transposed for base in bases], dim=1)
            for base, part in zip(bases, transposed.split(sizes, dim=1), strict=True):
                base.transposed = part
    for name, tensor in zip(_JOINT, (weight, bias, scale, transposed), strict=True):
        layers[0].register_buffer(name, tensor, persistent=False)
    shared = _Shared(members=tuple(layers), sizes=sizes, scaling=layers[0].scaling[ADAPTER])
    for place, layer in enumerate(layers):
        layer.__class__ = _Member
        # not through the module's own assignment, which would make the group's layers children of each other
        object.__setattr__(layer, "shared", shared)
        object.__setattr__(layer, "place", place)


def _one(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The tensors under each other in one; each becomes a view of its part."""
    whole = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = part
    return whole


def _is_active(layer: Any) -> bool:
    """True where the layer adds its own adapter, and no other, to its base's output."""
    return not (layer.disable_adapters or layer.merged) and layer.active_adapters == [ADAPTER]


def _scaled(down: torch.Tensor, scaling: float) -> torch.Tensor:
    """An adapter's first half with the adapter's scale: it is the smaller half, and 1 is left out."""
    return down if scaling == 1.0 else down * scaling


def _parts(shared: _Shared, inputs: torch.Tensor) -> Parts:
    """The members' outputs for the same input: of their bases, and what their adapters add."""
    first = shared.members[0]
    base = first.base_layer
    linear = torch.nn.functional.linear
    if isinstance(base, RowScaledLinear):
        whole = row_scaled(
            inputs,
            first.joint_weight,
            first.joint_scale,
            first.joint_bias,
            first.joint_transposed,
            kind=base.kind,
            fp8_compute=base.fp8_compute,
        )
    else:
        whole = linear(inputs, first.joint_weight, first.joint_bias)
    down = torch.cat([member.lora_A[ADAPTER].weight for member in shared.members])
    hidden = linear(inputs, _scaled(down, shared.scaling))
    return whole, hidden, tuple(member.lora_B[ADAPTER].weight for member in shared.members)
