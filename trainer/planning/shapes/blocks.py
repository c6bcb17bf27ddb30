"""A model's stacks of repeated blocks, and which of their blocks wait in host memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")
BLOCK = re.compile(r"(.*?\b\w+\.\d+)\.")
"""Start of a tensor's name: the outermost numbered module that it is in."""
LEAST_LINEARS = 2
"""A numbered module with fewer linear layers is no block."""


@dataclass(frozen=True, kw_only=True)
class Linears:
    """Weights of some linear layers, in numbers."""

    parameters: int = 0
    rows: int = 0
    """Of their outputs."""
    largest: int = 0
    """Parameters of the largest."""


NO_LINEARS = Linears()


def linears_of(sizes: Iterable[tuple[int, int]]) -> Linears:
    """Of weights (out, in)."""
    known = list(sizes)
    each = [math.prod(size) for size in known]
    return Linears(parameters=sum(each), rows=sum(rows for rows, _ in known), largest=max(each, default=0))


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Repeated blocks one after another, and the parameters of the largest of them."""

    name: str
    blocks: int
    quantized: int
    """Parameters of the linear weights that a quantised base would hold quantised."""
    rows: int
    """Their output rows."""
    others: int
    """All other parameters of the block."""
    fp32: int
    """Those of the others that the model's class keeps in fp32."""
    modulation: Linears = NO_LINEARS
    """Those of the others that int8 and nf4 bases quantise."""


def stacks(
    shapes: Mapping[str, tuple[int, ...]],
    quantized: Mapping[str, tuple[int, int]],
    kept_in_fp32: Iterable[str] = (),
    modulation: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[Stack, ...]:
    """All stacks, the longest first: the order in which their blocks leave the device.

    `quantized` are the linears, (out, in) by name, that a quantised base holds quantised, `modulation` those
    that int8 and nf4 hold so besides.
    """
    tensors, linears = _by_block(shapes), _by_block(quantized)
    more = _by_block(modulation or {})
    numbered: dict[str, list[str]] = {}
    for name in tensors:
        if len(linears.get(name, {})) >= LEAST_LINEARS:
            numbered.setdefault(name.rpartition(".")[0], []).append(name)
    kept = frozenset(kept_in_fp32)
    made = []
    for stack, members in numbered.items():
        sizes = {name: sum(map(math.prod, tensors[name].values())) for name in members}
        largest = max(members, key=sizes.__getitem__)
        own = linears_of(linears[largest].values())
        made.append(
            Stack(
                name=stack,
                blocks=len(members),
                quantized=own.parameters,
                rows=own.rows,
                others=sizes[largest] - own.parameters,
                fp32=sum(
                    math.prod(shape)
                    for tensor, shape in tensors[largest].items()
                    if not kept.isdisjoint(tensor.split("."))
                ),
                modulation=linears_of(more.get(largest, {}).values()),
            )
        )
    return tuple(sorted(made, key=lambda one: (-one.blocks, one.name)))


def _by_block(sizes: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Those of repeated blocks, by block and name."""
    found: dict[str, dict[str, _T]] = {}
    for name, size in sizes.items():
        block = BLOCK.match(name)
        if block is not None:
            found.setdefault(block[1], {})[name] = size
    return found
