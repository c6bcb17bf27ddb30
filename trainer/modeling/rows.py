"""The rows of a tensor that one of several ranks holds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a tensor that one of `size` ranks holds, as FSDP2 parts them: equal parts, rounded up, of
    which the last ranks may have less or nothing.
    """

    shape: tuple[int, ...]
    """Of the whole tensor; it has at least one dimension."""
    rank: int
    size: int

    @property
    def each(self) -> int:
        """Rows of a part that is full."""
        return -(-self.shape[0] // self.size)

    @property
    def start(self) -> int:
        """The first row."""
        return min(self.rank * self.each, self.shape[0])

    @property
    def stop(self) -> int:
        """The row after the last."""
        return min(self.start + self.each, self.shape[0])

    @property
    def values(self) -> int:
        """Values of one row."""
        return math.prod(self.shape[1:])

    @property
    def first_value(self) -> int:
        """Place of the first value in the whole tensor."""
        return self.start * self.values
