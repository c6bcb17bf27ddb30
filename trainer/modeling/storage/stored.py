"""The common part of all linear layers whose weight is not stored as a matrix of numbers."""

from __future__ import annotations

import torch

from trainer.ways.storages import Way


class StoredLinear(torch.nn.Linear):
    """A frozen linear layer that keeps its weight in a storage of `trainer.ways.storages`.

    It is made in the place of `linear`, whose bias it takes, and has no weight until `quantize` is called.
    """

    kind: str
    """`Way.weights`."""

    def __init__(self, linear: torch.nn.Linear, way: Way) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.kind, self.bias = way.weights, linear.bias

    @classmethod
    def takes(cls, linear: torch.nn.Linear, way: Way) -> bool:
        """True if a linear with these sides can be stored and multiplied in this way."""
        return True

    def quantize(self, weight: torch.Tensor) -> None:
        """Store a weight (out, in) of full precision on the device that it is on."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The sides of torch's own layer, with the storage."""
        return f"{super().extra_repr()}, {self.kind}"
