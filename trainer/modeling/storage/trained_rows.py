"""Trained weights in rows: every rank of a run holds a part of each tensor's first dimension (FSDP2).

A block's weights are gathered before its forward and its backward pass and let go after each, and the sum of
its gradients over the ranks comes back in rows, added in fp32. So all ranks pass through the model together:
one that runs it alone would wait for the others for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.modeling.blocks.recompute import Blocks

Found = TypeVar("Found")


class Root(torch.nn.Module):
    """The model behind one door: whatever passes through it does so inside of this module's call.

    Weights outside of the blocks are there for the time of a call, also those that a family's loss reads of
    the model itself.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], Found]) -> Found:
        """Result of `call`."""
        return call()

    def run(self, call: Callable[[], Found]) -> Found:
        """Result of `call`, which passes through the model; all ranks do the same together.

        Of a call with gradients the weights outside of the blocks stay for the backward pass, which begins
        with them; else they are let go, since the rows may change before the next call.
        """
        root: Any = self
        root.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=False)
        found: Found = root(call)
        return found


def in_rows(model: torch.nn.Module, blocks: Blocks, *, device: str, size: int) -> Root:
    """The model with its parameters in rows over all ranks, those without values too.

    A module whose parameters are of another type than most is gathered for itself: what is gathered together
    is added together, in one type. Gradients are summed, not averaged.
    """
    mesh = init_device_mesh(torch.device(device).type, (size,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    root = Root(model)
    for module in (*_of_another_type(model), *blocks.values(), root):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return root


def _of_another_type(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules all of whose parameters are of one type, which is not that of most values."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    usual, found = max(counts, key=counts.__getitem__), list[torch.nn.Module]()

    def look(module: torch.nn.Module) -> None:
        types = {parameter.dtype for parameter in module.parameters()}
        if types and usual not in types:
            found.append(module)
        elif types != {usual}:
            for child in module.children():
                look(child)

    look(model)
    return found


def with_room(root: Root, device: str) -> None:
    """Give the rows of parameters without values memory on the device, which holds anything.

    Buffers keep their values.
    """
    buffers = {name: one.detach().clone() for name, one in root.named_buffers(remove_duplicate=False)}
    root.to_empty(device=device)
    for name, one in root.named_buffers(remove_duplicate=False):
        one.copy_(buffers[name])


def parameters(root: Root) -> Iterator[tuple[str, DTensor]]:
    """The model's parameters by their names in it; shared ones once."""
    for name, parameter in root.model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not in rows"
        yield name, parameter


def own_rows(parameter: DTensor) -> torch.Tensor:
    """This rank's rows, in the memory that they are gathered from."""
    with torch.no_grad():
        rows: torch.Tensor = parameter.to_local()
    return rows.detach()
