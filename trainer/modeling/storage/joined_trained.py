"""Trained linears that are given the same input, computed as one, in their own type or in FP8.

One product is faster than three narrow ones, backward makes one gradient of the input instead of three that
are added, and in FP8 the input is quantised, kept and turned once:

    weight       (out_1 + out_2 .., in)       each layer's own is a view of its rows, under its own name
    output       inputs x weight              beside each other; each layer hands out its columns
    d inputs  =  d output x weight            one product sums what all layers give to the input
    d weight  =  d output x inputs            one product; each layer's gradient is a view of its rows

All that reads or writes a parameter goes on as before, as long as it writes in place. While a model draws or
is judged (`eval`) each layer multiplies its own weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.modeling.blocks.recompute import Blocks
from trainer.modeling.blocks.same_input import Group, become_members, in_one
from trainer.modeling.storage.fp8_trained import (
    Fp8TrainedLinear,
    by_member,
    fp8_joined_linear,
    refresh_weights,
)

# views are aligned as tensors of their own would be, for kernels that read many bytes at a time
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Numbers of layers that share a product, and of these products."""

    layers: int
    groups: int

    def __str__(self) -> str:
        return f"{self.layers} layers that are given the input of others are joined in {self.groups} groups"


class JoinedLinear(torch.nn.Linear):
    """A linear layer of a group. It is assigned as the class of a layer, never constructed."""

    shared: Group
    place: int
    joint_weight: torch.Tensor
    """(sum of out, in), of the first layer; as the next one."""
    joint_bias: torch.Tensor | None
    """(sum of out,)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out), computed for all members when the first one is called."""
        if not self.training:
            return super().forward(input)
        whole = None
        if self.place == 0:
            whole = joined_linear(input, self.joint_weight, self.joint_bias, *_parameters(self.shared))
        return self.shared.output(self.place, input, whole)


class JoinedFp8Linear(Fp8TrainedLinear):
    """An FP8 layer of a group, whose first one has the bytes of all. Assigned like `JoinedLinear`."""

    shared: Group
    place: int
    joint_weight: torch.Tensor
    joint_bias: torch.Tensor | None

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the weights of all members as they are now, when it is the first one's turn."""
        if self.place == 0:
            self._quantize(self.joint_weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out), computed for all members when the first one is called."""
        if not self.training:
            return super().forward(input)
        whole = None
        if self.place == 0:
            weights, biases = _parameters(self.shared)
            whole = fp8_joined_linear(
                input, weights, self.quantized, biases, self.joint_bias, self.weight_gradient
            )
        return self.shared.output(self.place, input, whole)


_MEMBERS: dict[type, type] = {torch.nn.Linear: JoinedLinear, Fp8TrainedLinear: JoinedFp8Linear}


def join_trained(model: torch.nn.Module, names: Iterable[Sequence[str]], blocks: Blocks) -> Joined:
    """Join the trained linears that are given the same input: `names` by input, in the order of their calls
    (`same_inputs`).

    Layers are joined where they are in one of the `blocks` and alike: of one type, in FP8 or not, with a bias
    or without. Tied weights stay single. Parameters stay the same objects under the same names.
    """
    ties = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    homes = {f"{block}.{name}": block for block, one in blocks.items() for name, _ in one.named_modules()}
    layers = groups = 0
    for together in names:
        alike: dict[Any, list[torch.nn.Linear]] = {}
        for name in together:
            layer = model.get_submodule(name)
            assert isinstance(layer, torch.nn.Linear)
            if name in homes and all(ties[id(one)] == 1 for one in layer.parameters()) and _is_plain(layer):
                alike.setdefault((homes[name], *_kind(layer)), []).append(layer)
        for members in alike.values():
            if len(members) > 1:
                _join(members)
                layers, groups = layers + len(members), groups + 1
    return Joined(layers=layers, groups=groups)


def products_of(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Linear, ...]]:
    """The layers that multiply in FP8 while they train, those of one product together."""
    for module in model.modules():
        if isinstance(module, JoinedFp8Linear):
            if module.place == 0:
                yield module.shared.members
        elif isinstance(module, Fp8TrainedLinear):
            yield (module,)


def _is_plain(layer: torch.nn.Linear) -> bool:
    """True for a trained layer whose parameters would begin where tensors of their own do."""
    return type(layer) in _MEMBERS and all(
        one.requires_grad and one.nbytes % _ALIGNMENT_BYTES == 0 for one in layer.parameters()
    )


def _kind(layer: torch.nn.Linear) -> tuple[Any, ...]:
    fp8 = (layer.copies, layer.weight_gradient) if isinstance(layer, Fp8TrainedLinear) else ()
    return type(layer), *((one.dtype, one.device) for one in layer.parameters()), *fp8


def _join(layers: Sequence[torch.nn.Linear]) -> None:
    first: Any = layers[0]
    become_members(layers, _MEMBERS[type(first)])
    bias = None if first.bias is None else in_one([layer.bias for layer in layers])
    first.register_buffer("joint_weight", in_one([layer.weight for layer in layers]), persistent=False)
    first.register_buffer("joint_bias", bias, persistent=False)


def _parameters(shared: Group) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The members' weights, and their biases where they have any."""
    has_bias = shared.members[0].bias is not None
    biases = [member.bias for member in shared.members] if has_bias else []
    return [member.weight for member in shared.members], biases


def follow_weights(model: torch.nn.Module) -> int:
    """`refresh_weights`, where joined ones are still what is multiplied; gives the number of FP8 layers.

    AssertionError where a parameter was replaced, and is no longer where the product reads it.
    """
    for first in model.modules():
        if isinstance(first, JoinedLinear | JoinedFp8Linear) and first.place == 0:
            weights, biases = _parameters(first.shared)
            _require_views(first.joint_weight, weights)
            if first.joint_bias is not None:
                _require_views(first.joint_bias, biases)
    return refresh_weights(model)


def _require_views(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        assert part.data_ptr() == place.data_ptr(), "a joined weight was replaced instead of written in place"


def joined_linear(
    inputs: torch.Tensor,
    joint_weight: torch.Tensor,
    joint_bias: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The layers' outputs beside each other: inputs (..., in) @ joint_weight (all out, in).T + joint_bias.

    The joint tensors are `weights` and `biases` under each other; these have the gradients, views of one.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    output: torch.Tensor = _Joined.apply(rows, joint_weight, joint_bias, len(weights), *weights, *biases)
    return output.reshape(*inputs.shape[:-1], output.shape[-1])


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layers: int,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.sizes, ctx.has_bias = [len(one) for one in parameters[:layers]], bias is not None
        return torch.nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        wants, first_bias = ctx.needs_input_grad, _FIRST + len(ctx.sizes)
        of_inputs = gradient @ weight if wants[0] else None
        of_weight = gradient.t() @ inputs if any(wants[_FIRST:first_bias]) else None
        of_bias = gradient.sum(0) if any(wants[first_bias:]) else None
        of_biases = by_member(of_bias, ctx.sizes) if ctx.has_bias else ()
        return of_inputs, None, None, None, *by_member(of_weight, ctx.sizes), *of_biases


# place of the first weight among what `_Joined` is given
_FIRST = 4
