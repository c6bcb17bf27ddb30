"""The kind of all linear layers whose weight is not stored as a matrix of numbers."""

from __future__ import annotations

import torch


class StoredLinear(torch.nn.Linear):
    """A frozen linear layer that keeps its weight in a storage of `trainer.ways.storages`."""

    kind: str
    """`Way.weights`."""
