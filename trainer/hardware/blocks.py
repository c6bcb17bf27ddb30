"""Floor 2: a model's stacks of repeated blocks, and which of their blocks wait in host memory."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    linears: int
    """Linear layers of a block whose weights a quantised base would hold quantised."""
    quantized: int
    """Parameters of those weights."""
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
    blocks: dict[str, dict[str, int]] = {}
    for name, shape in shapes.items():
        found = BLOCK.match(name)
        if found is not None:
            blocks.setdefault(found[1], {})[name] = math.prod(shape)
    linears: dict[str, list[tuple[int, int]]] = {name: [] for name in blocks}
    for name, size in quantized.items():
        found = BLOCK.match(name)
        if found is not None:
            linears[found[1]].append(size)
    besides: dict[str, list[tuple[int, int]]] = {}
    for name, size in (modulation or {}).items():
        found = BLOCK.match(name)
        if found is not None:
            besides.setdefault(found[1], []).append(size)
    numbered: dict[str, list[str]] = {}
    for name in blocks:
        if len(linears[name]) >= LEAST_LINEARS:
            numbered.setdefault(name.rpartition(".")[0], []).append(name)
    kept = frozenset(kept_in_fp32)
    made = []
    for stack, members in numbered.items():
        largest = max(members, key=lambda name: sum(blocks[name].values()))
        one = _stack(stack, len(members), blocks[largest], linears[largest], kept)
        made.append(dataclasses.replace(one, modulation=linears_of(besides.get(largest, ()))))
    return tuple(sorted(made, key=lambda one: (-one.blocks, one.name)))


def _stack(
    name: str, count: int, block: Mapping[str, int], linears: Sequence[tuple[int, int]], kept: frozenset[str]
) -> Stack:
    quantized = sum(math.prod(size) for size in linears)
    fp32 = sum(size for tensor, size in block.items() if not kept.isdisjoint(tensor.split(".")))
    return Stack(
        name=name,
        blocks=count,
        linears=len(linears),
        quantized=quantized,
        rows=sum(rows for rows, _ in linears),
        others=sum(block.values()) - quantized,
        fp32=fp32,
    )


def waiting(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Which blocks of stacks of these lengths wait in host memory: all of one stack before the next.

    Those of a stack lie as far from each other as they can: a block is copied while all blocks between the
    one before and it compute.
    """
    chosen = []
    for length in lengths:
        part = min(length, count)
        chosen.append([(2 * place + 1) * length // (2 * part) for place in range(part)])
        count -= part
    return chosen
