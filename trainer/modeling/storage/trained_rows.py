"""Trained weights in rows: every rank of a run holds a part of each tensor's first dimension (FSDP2).

A block's weights are gathered before its forward and its backward pass and let go after each, and the sum of
its gradients over the ranks comes back in rows, added in fp32. So all ranks pass through the model together:
one that runs it alone would wait for the others for ever.

Of weights that train in FP8 bytes are gathered, not bf16. A scale is one output row's, so each rank quantises
its own rows once a step: half of what travels, and of what a gathered block takes. `fully_shard` asks a
parameter's local tensor what to gather (`fsdp_pre_all_gather`) and what to make of it
(`fsdp_post_all_gather`); `OwnRows` answers. The parameter that such a layer has while its block is gathered
is never read: its gradient alone is wanted. So it has the whole weight's shape and no memory. While a model
draws or is judged (`eval`) the weight itself is multiplied, and each layer gathers that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from trainer.modeling.blocks.recompute import Blocks
from trainer.modeling.storage.fp8_product import quantize_rows_into
from trainer.modeling.storage.fp8_trained import Fp8TrainedLinear, WeightGradient

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
        rows = _plain(parameter.to_local())
    return rows.detach()


def _plain(local: torch.Tensor) -> torch.Tensor:
    """The memory that a local tensor of a parameter in rows stands for."""
    return local.rows if isinstance(local, OwnRows) else local


class OwnRows(torch.Tensor):
    """A rank's rows of a weight, or before it is parted the whole one, in `rows`; computes as they do."""

    rows: torch.Tensor

    @staticmethod
    def __new__(cls, rows: torch.Tensor) -> OwnRows:
        """A tensor of the shape and type of `rows`."""
        made: OwnRows = torch.Tensor._make_wrapper_subclass(
            cls, rows.size(), strides=rows.stride(), dtype=rows.dtype, device=rows.device
        )
        return made

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __repr__(self) -> str:  # type: ignore[override]
        """The rows, as torch prints them."""
        return f"OwnRows({self.rows!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Result of an operator on the rows: rows again, or the tensor itself that it has written to."""
        given, named = tree_map_only(OwnRows, lambda one: one.rows, (args, kwargs or {}))
        found = func(*given, **named)
        if given and found is given[0]:
            return args[0]
        return tree_map_only(torch.Tensor, cls, found)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Any]:
        """The bytes and scales of this rank's rows, and the layer that they are of."""
        return module.own_bytes, module

    def fsdp_post_all_gather(
        self, gathered: Sequence[torch.Tensor], layer: Any, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Hand the layer the whole bytes and scales; a parameter for the gradient.

        Their memory stays the same tensors', which FSDP2 empties between uses.
        """
        if out is not None:
            out.untyped_storage().resize_(0)
            return None
        layer.values, layer.scale = gathered
        carrier = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device=gathered[0].device)
        return carrier, (carrier,)


# `fully_shard` looks at it at each gather of each weight: a kept one takes the host a third of the time
OwnRows.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    OwnRows.fsdp_pre_all_gather
)


class Fp8RowsLinear(Fp8TrainedLinear):
    """A layer whose weight is to lie in rows over the ranks: made before `fully_shard` parts the model."""

    def __init__(self, linear: torch.nn.Linear, *, weight_gradient: WeightGradient = "fp8") -> None:
        super().__init__(linear, copies=1, weight_gradient=weight_gradient)
        self.weight = torch.nn.Parameter(OwnRows(linear.weight.detach()), linear.weight.requires_grad)
        self._own: torch.Tensor | None = None
        self._bytes: tuple[torch.Tensor, torch.Tensor] | None = None
        self._group: Any = None

    @property
    def own_bytes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """e4m3 (rows, in) and scales (rows, 1) of this rank's rows at the last `refresh`."""
        assert self._bytes is not None, "refresh comes before the first pass"
        return self._bytes

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise this rank's rows as they are now."""
        assert isinstance(self.weight, DTensor), "weights change while they lie in rows"
        if self._own is None or self._bytes is None:  # asking for them takes the host longer than a launch
            own = self._own = own_rows(self.weight)
            self._group = self.weight.device_mesh.get_group()
            values = torch.empty(own.shape, dtype=torch.float8_e4m3fn, device=own.device)
            self._bytes = values, torch.empty(len(own), 1, dtype=torch.float32, device=own.device)
        quantize_rows_into(self._own, *self._bytes)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8RowsLinear:
        """The layer with `fn` of its tensors, which may lie elsewhere then."""
        self._own = self._bytes = None
        applied: Fp8RowsLinear = super()._apply(fn, recurse)
        return applied

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out) in the input's dtype."""
        if self.training:
            return super().forward(input)
        return torch.nn.functional.linear(input, self._whole(), self.bias)

    def _whole(self) -> torch.Tensor:
        """The weight (out, in) of all ranks' rows, which all ask for together."""
        assert self._own is not None, "refresh comes before the first pass"
        whole = self._own.new_empty(self.out_features, self.in_features)
        dist.all_gather(list(whole.chunk(dist.get_world_size(self._group))), self._own, group=self._group)
        return whole
