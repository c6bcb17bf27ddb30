"""bf16 parameters on a CUDA device that one kernel updates: beginning a kernel for each takes the host longer
than most of them run, and the device waits for it.

The kernel finds its tensors by a table of addresses, which is made anew for each step, as gradients are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

if torch.version.cuda is not None:
    from trainer.modeling.triton import split_adamw as kernel


class Row(NamedTuple):
    """A parameter's step: contiguous tensors of one shape on one device, and what `kernel.update` sets."""

    weight: torch.Tensor
    low: torch.Tensor
    """The weight itself where there are no masters."""
    first: torch.Tensor
    second: torch.Tensor
    gradient: torch.Tensor
    begin: int
    """Place of the first value in the tensor of which these are rows."""
    seed: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors whose addresses the kernel is given, in its order."""
        return self.weight, self.low, self.first, self.second, self.gradient

    @property
    def fits(self) -> bool:
        """True where accesses of 16 bytes are possible."""
        return all(one.data_ptr() % kernel.ALIGNED == 0 for one in self.tensors)


class Launch(NamedTuple):
    """The arguments of a launch for all parameters whose gradients are of one type."""

    table: torch.Tensor
    parts: torch.Tensor
    fp32: bool
    rows: Sequence[Row]
    """They hold the gradients, of which the kernel knows the addresses."""

    def squares(self) -> torch.Tensor:
        """The sum of the squares of all gradients, a scalar in fp32."""
        return kernel.squares(self.table, self.parts, fp32=self.fp32).sum()


class Launches:
    """Makes the launches of a step."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, ...], torch.Tensor] = {}
        """By the numbers of values: these are the same in nearly every step."""

    def of(self, rows: Sequence[Row]) -> list[Launch]:
        """One for each type of gradients; the table's copy to the device is not waited for."""
        found = []
        for fp32 in (False, True):
            own = [row for row in rows if (row.gradient.dtype == torch.float32) == fp32]
            if not own:
                continue
            device = own[0].weight.device
            numbers = [
                [*(one.data_ptr() for one in row.tensors), row.weight.numel(), row.begin, row.seed]
                for row in own
            ]
            table = torch.tensor(numbers, dtype=torch.int64)
            if device.type == "cuda":
                table = table.pin_memory().to(device, non_blocking=True)
            counts = tuple(row.weight.numel() for row in own)
            if counts not in self._parts:
                self._parts[counts] = parts_of(counts, kernel.PART).to(device)
            found.append(Launch(table, self._parts[counts], fp32, own))
        return found


def parts_of(counts: Sequence[int], size: int) -> torch.Tensor:
    """(parameter, part of it) of each program, (programs, 2) int32, for parameters of so many values in parts
    of `size`.
    """
    each = torch.tensor([-(-count // size) for count in counts])
    rows = torch.repeat_interleave(torch.arange(len(counts)), each)
    before = torch.cumsum(each, 0) - each
    return torch.stack([rows, torch.arange(len(rows)) - before[rows]], dim=1).to(torch.int32)
