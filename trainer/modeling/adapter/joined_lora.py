"""LoRA layers that are given the same input, computed as one: query, key and value of an attention.

One product with a wide weight is faster than three with narrow ones, their adapters' first halves are one
product too, and in FP8 the input is quantised once. The layers stay what they are: their weights become
views of the wide one, their adapters keep their names, and `part_siblings` makes them single again. A layer
without siblings adds its adapter's product in one pass over its output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear

from trainer.modeling.adapter.lora import ADAPTER
from trainer.modeling.adapter.low_rank import add_low_rank
from trainer.modeling.blocks.same_input import Group, become_members, in_one, same_inputs
from trainer.modeling.storage.row_scaled import RowScaledLinear, row_scaled

# buffers of a group's first layer
_JOINT = ("joint_weight", "joint_bias", "joint_scale", "joint_transposed")

Parts = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]
"""The bases' outputs beside each other (..., all), and what the adapters add to them, as `add_low_rank` takes
it: hidden (..., all ranks), and `ups`.
"""


class _Member(LoraLinear):
    """A LoRA layer of a group. It is assigned as the class of a layer, never constructed."""

    shared: Group
    place: int

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute peft's forward pass, for all members when the first one is called."""
        if not _is_active(self):
            return super().forward(x, *args, **kwargs)
        joint = None
        if self.place == 0:
            whole, hidden, ups = _parts(self.shared, x)
            joint = add_low_rank(whole, hidden, *ups)
        return self.shared.output(self.place, x, joint)


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
    for names in same_inputs(model, run, (LoraLinear, _Single)):
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
    weight, scale, transposed = in_one([base.weight for base in bases]), None, None
    bias = None if bases[0].bias is None else in_one([base.bias for base in bases])
    if isinstance(bases[0], RowScaledLinear):
        scale = in_one([base.weight_scale for base in bases])
        if bases[0].transposed is not None:
            transposed = torch.cat([base.transposed for base in bases], dim=1)
            for base, part in zip(bases, transposed.split(sizes, dim=1), strict=True):
                base.transposed = part
    for name, tensor in zip(_JOINT, (weight, bias, scale, transposed), strict=True):
        layers[0].register_buffer(name, tensor, persistent=False)
    become_members(layers, _Member)


def _is_active(layer: Any) -> bool:
    """True where the layer adds its own adapter, and no other, to its base's output."""
    return not (layer.disable_adapters or layer.merged) and layer.active_adapters == [ADAPTER]


def _scaled(down: torch.Tensor, scaling: float) -> torch.Tensor:
    """An adapter's first half with the adapter's scale: it is the smaller half, and 1 is left out."""
    return down if scaling == 1.0 else down * scaling


def _parts(shared: Group, inputs: torch.Tensor) -> Parts:
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
    hidden = linear(inputs, _scaled(down, first.scaling[ADAPTER]))
    return whole, hidden, tuple(member.lora_B[ADAPTER].weight for member in shared.members)
