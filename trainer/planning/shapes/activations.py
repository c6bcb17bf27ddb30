"""Bytes of a micro-batch's activations: counts of one block, times the run's blocks and tokens.

The counts (activations.json) were made on a GPU by `python -m bench count`, in units of
tokens x width x bytes of a value: what a block keeps for backward is the same for any number of blocks and
tokens. Parts of them are derived from shapes: docs/adr/0007-activations-are-counted.md.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

COUNTS = Path(__file__).with_name("activations.json")
_ALL_LINEARS, _RECOMPUTED, _BUDGET = "all linears", "recomputed", "budget"
FULL = "full"
"""Begins the names of ways that were counted while every weight trains."""
COUNTED_ATTENTION = "flash"
"""The kernel that ways are counted with which name no other, and bf16 products."""
OTHER_ATTENTION = "cudnn"
"""In names of ways with a budget: counted with cuDNN's kernel. With flash-attn 4 blocks keep the same."""
# budgets from here on hold no more with other kernels, and with products of an FP8 base that is kept once;
# smaller ones may hold more
_LARGE = 0.6
PLAIN, FP8 = "bf16", "fp8"
Units = tuple[int, int]
"""Bytes of one value of every token: of all that the blocks see, and of the caption's, as some blocks see no
others.
"""
Kept = tuple[Mapping[str, int], int]
"""Bytes that an adapter holds besides what a plain LoRA of the rank that was counted does: of each stack's
largest block, for backward, and of the largest layer, while it computes.
"""
NOTHING_KEPT: Kept = ({}, 0)
Spared = Mapping[str, tuple[int, int]]
"""Bytes of the inputs of linears that a block of a stack does not keep, since these are frozen: of linears
that the attention preset has, and of others.
"""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes under one way to keep activations."""

    fixed: int
    """Bytes outside the blocks."""
    blocks: tuple[int, ...]
    """Bytes of each block, in the order in which blocks compute."""
    beyond: int
    """Bytes besides at the highest point: mostly gradients of one block."""

    @property
    def kept(self) -> int:
        """Bytes after the forward pass."""
        return self.fixed + sum(self.blocks)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes that one micro-batch holds beside weights and optimizer."""

    whole: Held
    """No block is recomputed."""
    recomputed: Held
    """Every block is recomputed: its input stays."""
    outside: Held
    """Every block is recomputed from outside its compiled part, as where its weights wait in host memory."""
    shares: Mapping[tuple[str, str], Mapping[float, Held]] = field(default_factory=dict)
    """Compiled blocks that keep a share of their activations, by `features.activation_budget`: these by
    (attention kernel, storage) that they were counted with, as compilers keep other tensors with
    OTHER_ATTENTION, and with weights that a product unpacks. COUNTED_ATTENTION has an empty name.
    """
    fp8_twice_as_bf16: bool = False
    """True where, under a large budget, blocks whose FP8 weights are kept twice were seen to hold no more
    than with a bf16 base. Others were seen to hold more (docs/benchmarks.md).
    """
    head: int = 0
    """The model's head at its highest point: a language model's logits, of a few tokens at a time."""
    stacks: tuple[str, ...] = ()
    """The stack of each block, in the order in which blocks compute."""
    stand_in: str = ""
    """The way whose counts stand in for those of a full fine-tune, which nobody has counted."""

    @property
    def saved(self) -> int:
        """The highest point where nothing is recomputed."""
        return self.whole.kept + max(self.whole.beyond, self.head)

    def peak(
        self,
        *,
        recomputed: int = 0,
        budget: float = 1.0,
        weights: str = PLAIN,
        flash: bool = True,
        twice: bool = False,
    ) -> int:
        """The highest point with the first `recomputed` blocks recomputed, or with a budget below 1.

        `weights` is how the frozen base is stored, where a budget depends on it, `fp8` for products in FP8.
        `flash` is false for another attention kernel than COUNTED_ATTENTION, `twice` true for FP8 weights
        that are kept twice. Backward starts with the last blocks: where the first are recomputed, the others
        have given back what they kept. A budget that was counted with this kernel and storage is planned so;
        another needs no more than any larger one.
        """
        if budget < 1.0:
            shares = self._budgets(weights, flash=flash, twice=twice)
            kernel = "" if flash and weights != FP8 else OTHER_ATTENTION
            own = budget in self.shares.get((kernel, weights), {})
            larger = [budget] if own else [share for share in shares if share >= budget]
            return min(shares[share].kept + max(shares[share].beyond, self.head) for share in larger)
        if not recomputed:
            return self.saved
        inputs = sum(self.recomputed.blocks[:recomputed])
        others = self.whole.fixed + sum(self.whole.blocks[recomputed:])
        return max(
            inputs + others + max(self.whole.beyond if others else 0, self.head),
            inputs + self.recomputed.fixed + max(self.recomputed.beyond, self.head),
        )

    def scaled(self, share: float) -> Activations:
        """Activations of a share of a micro-batch's samples; what the head holds stays."""

        def of(held: Held) -> Held:
            blocks = tuple(int(share * one) for one in held.blocks)
            return Held(fixed=int(share * held.fixed), blocks=blocks, beyond=int(share * held.beyond))

        return replace(self, whole=of(self.whole), recomputed=of(self.recomputed))

    def backward(
        self, gradients: Sequence[int], head: int, *, recomputed: int, stay: bool
    ) -> tuple[int, int]:
        """(bytes of activations and new gradients at the highest point, bytes of activations before it).

        `gradients` are bytes of those of each block, in the order in which blocks compute, `head` of a
        head's, which are made with the loss. Unless they `stay` they are added to others as a block ends.
        """
        sizes = (*self.recomputed.blocks[:recomputed], *self.whole.blocks[recomputed:])
        fixed = (self.recomputed if recomputed >= len(sizes) > 0 else self.whole).fixed
        saved = left = fixed + sum(sizes)
        highest, passed = saved + self.head + head, head if stay else 0
        for number in reversed(range(len(sizes))):
            new = passed + gradients[number]
            held = self.recomputed if number < recomputed else self.whole
            highest = max(highest, left + held.beyond + new)
            left, passed = left - sizes[number], new if stay else 0
        return highest, saved

    def _budgets(self, weights: str, *, flash: bool, twice: bool = False) -> Mapping[float, Held]:
        """Activations by the share that is kept, as far as it was counted for such kernels and products.

        Shares that were not counted are left out: they are planned as the next larger one.
        """
        other = not flash or weights == FP8
        plain = self.shares.get(("", PLAIN), {}) if self.fp8_twice_as_bf16 or not twice else {}
        found = {share: held for share, held in plain.items() if share >= _LARGE or not other}
        if not flash and weights != FP8:
            found |= self.shares.get((OTHER_ATTENTION, PLAIN), {})
        if weights != PLAIN:
            found |= self.shares.get(("", weights), {})
            found |= self.shares.get((OTHER_ATTENTION, weights), {}) if other else {}
        return {1.0: self.whole, **found}


@functools.cache
def counted(family: str) -> Mapping[str, Any]:
    """The counts of a family. Raises KeyError where it has none."""
    found: Mapping[str, Any] = json.loads(COUNTS.read_text())[family]
    return found


def activations(
    counts: Mapping[str, Any],
    blocks: Mapping[str, int],
    units: Units,
    *,
    compiled: bool,
    linear_inputs: bool,
    head: int,
    more: tuple[float, float, float] = (0.0, 0.0, 0.0),
    adapter: Kept = NOTHING_KEPT,
    spared: Spared = MappingProxyType({}),
    trained: str = "",
) -> Activations:
    """Activations from a family's counts and the number of blocks of each stack.

    `linear_inputs`: inputs of all linears are kept too. `more`: units beyond the counts: of each block, one
    that is computed again, at the highest point without. `adapter` is held beyond a plain LoRA, `spared` not
    held. `trained`: type of a full fine-tune's products, with its own counts or a LoRA's on all linears.
    """
    ways, style = counts["ways"], "compiled" if compiled else "eager"
    (every, captions), (kept, beyond_kept), (more_kept, more_again, more_beyond) = units, adapter, more
    caption_bytes = [counts["beside"].get(name, 0.0) * captions for name in counts["stacks"]]

    def held(way: str, *, recomputes: bool = False) -> Held:
        found, each, extra = ways[way], list[int](), _extra(ways, way, more_kept, linear_inputs=linear_inputs)
        for number, name in enumerate(counts["stacks"]):
            unit = captions if name in counts["captions"] else every
            size = found["blocks"][number] * unit
            if not recomputes:
                size += extra[number] * unit + caption_bytes[number] + kept.get(name, 0)
            if way == style:  # budgets are shares of less, and were not counted so
                size -= _spared(spared.get(name, (0, 0)), (extra[number] - more_kept) * unit)
            each += [int(size)] * blocks.get(name, 0)
        beyond = (found["beyond"] + (0.0 if recomputes else more_beyond)) * every + beyond_kept
        if recomputes:  # one block's
            beyond += (max(extra) - more_kept + more_again) * every
            beyond += max(caption_bytes) + max(kept.values(), default=0)
        return Held(fixed=int(found["fixed"] * every), blocks=tuple(each), beyond=int(beyond))

    whole, inside, outside = _counted_ways(ways, style, trained)
    return Activations(
        whole=held(whole),
        recomputed=held(inside, recomputes=True),
        outside=held(outside, recomputes=True),
        fp8_twice_as_bf16=counts.get("fp8_twice_as_bf16", False),
        shares=_shares({way: held(way) for way in ways if way.startswith(style) and _BUDGET in way}),
        head=head,
        stacks=tuple(name for name in counts["stacks"] for _ in range(blocks.get(name, 0))),
        stand_in=f"{style}, {_ALL_LINEARS}" if trained and whole == style else "",
    )


def _counted_ways(ways: Mapping[str, Any], style: str, trained: str) -> tuple[str, str, str]:
    """Ways with everything kept, recomputed, and recomputed outside of compiled code; those of a full
    fine-tune where they were counted.
    """
    own = full_way(compiled=style == "compiled", products=trained) if trained else style
    inside = next(way for one in (own, style) if (way := f"{one}, {_RECOMPUTED}") in ways)
    outside = f"{style}, {_RECOMPUTED} outside"
    return own if own in ways else style, inside, outside if outside in ways else inside


def _spared(inputs: tuple[int, int], counted_of_others: float) -> float:
    """Bytes of inputs that are not held, of others than attention's no more than was counted."""
    return inputs[0] + min(inputs[1], max(0.0, counted_of_others))


def _extra(ways: Mapping[str, Any], way: str, more: float, *, linear_inputs: bool) -> list[float]:
    """Units that a block of each stack keeps beyond the counts of a way; a full fine-tune's have all."""
    style = way.partition(",")[0]
    if style == FULL or not linear_inputs:
        return [more] * len(ways[way]["blocks"])
    plain, wide = (ways[one]["blocks"] for one in (style, f"{style}, {_ALL_LINEARS}"))
    return [more + most - one for most, one in zip(wide, plain, strict=True)]


def full_way(*, compiled: bool, products: str = PLAIN) -> str:
    """The name under which a full fine-tune's blocks are counted, by the type that its products are in."""
    name = f"{FULL}, {'compiled' if compiled else 'eager'}"
    return f"{name}, {FP8}" if products == FP8 else name


def _shares(ways: Mapping[str, Held]) -> dict[tuple[str, str], dict[float, Held]]:
    """Ways with a budget by (attention kernel, storage) that they name, and by the share that is kept.

    "compiled, budget 0.6", "compiled, int8, budget 0.6", "compiled, cudnn, budget 0.6" and "compiled, int8,
    cudnn, budget 0.6".
    """
    found: dict[tuple[str, str], dict[float, Held]] = {}
    for way, held in ways.items():
        before, _, share = way.rpartition(f", {_BUDGET} ")
        parts = before.split(", ")[1:]
        kernel = OTHER_ATTENTION if OTHER_ATTENTION in parts else ""
        weights = next((part for part in parts if part != kernel), PLAIN)
        found.setdefault((kernel, weights), {})[float(share)] = held
    return found
