"""Fp32 masters of many small parameters in one tensor: a step is a few kernels, not thousands."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# start of each parameter, in values: 32 bytes, so that kernels can read four or eight at a time
_ALIGNMENT = 8


class FlatGradients:
    """The gradients of one micro-batch under each other in one tensor, in their own type."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self._starts, end = dict[str, int](), 0
        for name, parameter in self.parameters.items():
            self._starts[name] = end
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        types = {parameter.dtype for parameter in self.parameters.values()}
        # of several types in the widest; one type is exact, and half the size in bf16
        device, dtype = next(iter(self.parameters.values())).device, types.pop() if len(types) == 1 else None
        self.latest = torch.zeros(end, device=device, dtype=dtype)
        self._views = self.by_name(self.latest)

    def by_name(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a tensor of this size, with the parameters' names and shapes."""
        return {
            name: flat[start : start + self.parameters[name].numel()].view(self.parameters[name].shape)
            for name, start in self._starts.items()
        }

    @torch.no_grad()
    def collect(self) -> set[str]:
        """Take the parameters' gradients, and free them; gives their names. One that is missing is zero.

        Does the same whatever came before, so that it can be part of a CUDA graph.
        """
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if len(found) < len(self.parameters):
            self.latest.zero_()
        if found:
            # all in one kernel, which adding tensors of two types would not be
            torch._foreach_copy_([self._views[name] for name in found], list(found.values()))
        for name in found:
            self.parameters[name].grad = None
        return set(found)


class FlatMasters:
    """One fp32 tensor with all parameters under each other, another with their summed gradients."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.latest = FlatGradients(parameters)
        self.parameters, self.by_name = self.latest.parameters, self.latest.by_name
        like = self.latest.latest
        self.flat = torch.nn.Parameter(torch.zeros_like(like, dtype=torch.float32))
        self.gradient = torch.zeros_like(like, dtype=torch.float32)
        self.views = self.by_name(self.flat.detach())
        torch._foreach_copy_(list(self.views.values()), [p.detach() for p in self.parameters.values()])

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the parameters' gradients to the sum, and free them; one that is missing counts as zero."""
        self.latest.collect()
        self.gradient.add_(self.latest.latest)

    def drop_gradients(self) -> None:
        """Forget the summed gradients."""
        self.gradient.zero_()
        self.flat.grad = None
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the parameters that the model computes with."""
        torch._foreach_copy_(list(self.parameters.values()), list(self.views.values()))
