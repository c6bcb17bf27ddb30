"""A model's stacks of repeated blocks and its linear layers, in numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")
Size = tuple[int, int]
"""(out, in) of a linear layer."""
_BLOCK = re.compile(r"(.*?\b\w+\.\d+)\.")
"""Start of a tensor's name: the outermost numbered module that it is in."""
_LEAST_LINEARS = 2
"""A numbered module with fewer linear layers is no block."""


@dataclass(frozen=True, kw_only=True)
class Linears:
    """Weights of some linear layers, in numbers."""

    parameters: int = 0
    rows: int = 0
    """Rows of their outputs."""
    largest: int = 0
    """Parameters of the largest."""

    def __add__(self, other: Linears) -> Linears:
        return Linears(
            parameters=self.parameters + other.parameters,
            rows=self.rows + other.rows,
            largest=max(self.largest, other.largest),
        )


NO_LINEARS = Linears()


def linears_of(sizes: Iterable[Size]) -> Linears:
    """The numbers of weights (out, in)."""
    known = list(sizes)
    each = [math.prod(size) for size in known]
    return Linears(parameters=sum(each), rows=sum(rows for rows, _ in known), largest=max(each, default=0))


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Repeated blocks one after another, and the parameters of the largest of them."""

    name: str
    blocks: int
    quantized: Linears
    """Linear weights that a quantised base would hold quantised."""
    others: int
    """All other parameters of the block."""
    fp32: int
    """Parameters among the others that the model's class keeps in fp32."""
    modulation: Linears = NO_LINEARS
    """Linears among the others that int8 and nf4 bases quantise."""


def stacks(
    shapes: Mapping[str, tuple[int, ...]],
    quantized: Mapping[str, Size],
    kept_in_fp32: Iterable[str] = (),
    modulation: Mapping[str, Size] | None = None,
) -> tuple[Stack, ...]:
    """All stacks, the longest first: the order in which their blocks leave the device.

    `quantized` are the linears, (out, in) by name, that a quantised base holds quantised, `modulation` those
    that int8 and nf4 hold so besides.
    """
    tensors, linears, more = by_block(shapes), linear_blocks(quantized), by_block(modulation or {})
    numbered: dict[str, list[str]] = {}
    for name in linears:
        numbered.setdefault(name.rpartition(".")[0], []).append(name)
    made = []
    for stack, members in numbered.items():
        sizes = {name: sum(map(math.prod, tensors[name].values())) for name in members}
        largest = max(members, key=sizes.__getitem__)
        own = linears_of(linears[largest].values())
        made.append(
            Stack(
                name=stack,
                blocks=len(members),
                quantized=own,
                others=sizes[largest] - own.parameters,
                fp32=fp32_parameters(tensors[largest], kept_in_fp32),
                modulation=linears_of(more.get(largest, {}).values()),
            )
        )
    return tuple(sorted(made, key=lambda one: (-one.blocks, one.name)))


def fp32_parameters(shapes: Mapping[str, tuple[int, ...]], kept: Iterable[str]) -> int:
    """Parameters of the tensors with one of these words in their names, which stay fp32 in a bf16 run."""
    words = frozenset(kept)
    return sum(math.prod(shape) for name, shape in shapes.items() if not words.isdisjoint(name.split(".")))


def linear_blocks(linears: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Linear layers of the repeated blocks, by block and name."""
    return {name: found for name, found in by_block(linears).items() if len(found) >= _LEAST_LINEARS}


def by_block(named: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Values of the names that lie in a numbered module, by that module and by name."""
    found: dict[str, dict[str, _T]] = {}
    for name, value in named.items():
        block = _BLOCK.match(name)
        if block is not None:
            found.setdefault(block[1], {})[name] = value
    return found
