"""Fp32 masters of many small parameters in one tensor: a step is a few kernels, not thousands."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# start of each parameter, in values: 32 bytes, so that kernels can read four or eight at a time
_ALIGNMENT = 8


class FlatMasters:
    """One fp32 tensor with all parameters under each other, another with their summed gradients."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        starts, end = {}, 0
        for name, parameter in self.parameters.items():
            starts[name] = end
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        device = next(iter(self.parameters.values())).device
        self.flat = torch.nn.Parameter(torch.zeros(end, device=device))
        self.gradient = torch.zeros(end, device=device)
        types = {parameter.dtype for parameter in self.parameters.values()}
        # one micro-batch's; in the gradients' type, which is exact and half the size
        self._latest = torch.zeros(end, device=device, dtype=types.pop() if len(types) == 1 else None)
        self._starts = starts
        self.views = self.by_name(self.flat.detach())
        self._gradients = self.by_name(self._latest)
        torch._foreach_copy_(list(self.views.values()), [p.detach() for p in self.parameters.values()])

    def by_name(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a tensor of the masters' size, with the parameters' names and shapes."""
        return {
            name: flat[start : start + self.parameters[name].numel()].view(self.parameters[name].shape)
            for name, start in self._starts.items()
        }

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the parameters' gradients to the sum, and free them; one that is missing counts as zero.

        Does the same whatever came before, so that it can be part of a CUDA graph.
        """
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if not found:
            return
        if len(found) < len(self.parameters):
            self._latest.zero_()
        # all in one kernel, which adding tensors of two types would not be
        torch._foreach_copy_([self._gradients[name] for name in found], list(found.values()))
        self.gradient.add_(self._latest)
        for name in found:
            self.parameters[name].grad = None

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
