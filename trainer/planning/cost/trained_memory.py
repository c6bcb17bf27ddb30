"""Memory of runs that train whole weights: gradients beside activations, FP8 copies, weights in rows."""

from __future__ import annotations

import math

from trainer.planning.cost import states
from trainer.planning.cost.storage import Storage, counted, linear_bytes, parameters
from trainer.planning.plan import MemoryRow
from trainer.planning.shapes.activations import Activations, full_way
from trainer.planning.shapes.geometry import Geometry, Stack
from trainer.ways.storages import VALUE_BYTES
from trainer.words.sizes import gib

FP32_MORE_BYTES = 2
"""Bytes more of a parameter that a bf16 run keeps in fp32: of its weight, and where it trains of its gradient
and in the optimizer.
"""
# gathered blocks: one computes while the next one comes
_PAGES = 2
# e4m3 bytes of a value of a gradient: by rows for the inputs' gradient, by columns for the weight's
_LAYOUTS = 2


def activations_of(storage: Storage, geometry: Geometry) -> Activations:
    """The counts for blocks that compute as `storage` says."""
    if not storage.compile:
        return geometry.activations
    in_fp8 = geometry.activations_fp8 if storage.way.trains and storage.way.compute else None
    return geometry.activations_compiled if in_fp8 is None else in_fp8


def beside_gradients(storage: Storage, geometry: Geometry) -> tuple[int, str]:
    """Bytes at the highest point of a step beyond the gradients of all weights, and words on them.

    In a step of one micro-batch gradients come as activations go, and the highest point is where backward
    begins, or where it ends, or in the optimizer's step. Gradients of earlier micro-batches are there from
    the start: then a block's new ones come beside them, until they are added. A batch whose samples differ in
    shape is several, each of them smaller.
    """
    activations = activations_of(storage, geometry)
    of_all, of_blocks, of_head = _gradients(storage, geometry, activations)
    step = _step_bytes(storage, geometry)
    recomputed = storage.recomputed or len(of_blocks) if storage.checkpointing else 0
    words = f", as counted of {activations.stand_in}" if activations.stand_in else ""
    if _lacks_fp8(storage, geometry) and not activations.stand_in:
        words = f", as counted of {full_way(compiled=storage.compile)}"
    if storage.activation_budget < 1.0:
        # blocks that keep a share were counted with a LoRA alone: nothing is taken to go before all is there
        peak = activations.peak(budget=storage.activation_budget, weights=storage.way.weights)
        return max(peak + max(of_blocks, default=0), step), words
    new = of_blocks if storage.compile else [_largest(storage, geometry) * storage.value_bytes]
    most = [max(new, default=0)] * len(of_blocks)

    def later(share: float) -> int:
        return activations.scaled(share).backward(most, of_head, recomputed=recomputed, stay=False)[0]

    if storage.rounds > 1:
        return max(later(1.0), step), words
    highest, saved = activations.backward(of_blocks, of_head, recomputed=recomputed, stay=True)
    alone = max(highest, of_all + step) - of_all
    part = _later_part(geometry)
    if part and (parted := later(part)) > alone:
        return parted, f" of a batch's second part{words}"
    return alone, f" ({gib(saved)}), which gradients take the place of{words}"


def _later_part(geometry: Geometry) -> float:
    """Samples of the largest micro-batch that another one may come before, as a share of a batch; 0.0 where
    a batch is never parted.
    """
    *smaller, _ = geometry.usual_parts.get("as they are", (1.0,))
    return max((size for size, often in enumerate(smaller, 1) if often), default=0) / (len(smaller) + 1)


def _gradients(
    storage: Storage, geometry: Geometry, activations: Activations
) -> tuple[int, tuple[int, ...], int]:
    """Bytes of the gradients of all weights, of each block's in the order in which blocks compute, and of a
    head's, which are made with the loss.
    """
    each = states.of(storage.method, storage.dtype, storage.optimizer)[1]
    stacks = {
        one.name: (one.quantized.parameters + one.others) * each + one.fp32 * FP32_MORE_BYTES
        for one in geometry.stacks
    }
    sizes = tuple(stacks.get(name, 0) for name in activations.stacks) or (0,) * len(activations.whole.blocks)
    more = geometry.fp32_parameters * FP32_MORE_BYTES
    return parameters(geometry, "trained") * each + more, sizes, math.prod(geometry.head_size) * each


def _step_bytes(storage: Storage, geometry: Geometry) -> int:
    """Bytes that the optimizer's step needs beside weights, gradients and its state: a parameter's mean is
    made of an fp32 copy of it. All else is written in place.
    """
    if not storage.averaged:
        return 0
    shapes = (part.shapes.values() for part in geometry.components if part.role == "trained")
    return VALUE_BYTES["fp32"] * max((math.prod(one) for each in shapes for one in each), default=0)


def fp8_rows(storage: Storage, geometry: Geometry) -> list[MemoryRow]:
    """Memory of what trained weights are rounded to once a step, where products are in another type, and of
    a gradient's bytes where activations were not counted with them.
    """
    way = storage.way
    if not way.compute:
        return []
    linears, twice = geometry.quantized, " twice" if way.copies == 2 else ""
    name, detail = f"{way.compute} weights", f"{counted(linears.parameters)}{twice}, made once a step"
    size = linear_bytes(way, linears)
    if storage.in_rows:
        size, detail = -(-size // storage.ranks), f"{detail}, the rows of one of {storage.ranks} GPUs"
    rows = [MemoryRow(name, size, detail)]
    if way.copies == 1:
        size = _largest(storage, geometry)
        rows.append(
            MemoryRow(f"{way.compute} transposed", size, "one product's weights at a time, transient")
        )
    if storage.in_rows:
        rows.append(_inputs_row(storage, geometry))
    if _lacks_fp8(storage, geometry) and geometry.widest_output:
        layouts = 1 if storage.weight_gradient == "bf16" else _LAYOUTS
        by = "by rows" if layouts == 1 else "by rows and by columns"
        size = layouts * geometry.widest_output
        rows.append(MemoryRow(f"{way.compute} gradients", size, f"of the widest product, {by}, transient"))
    return rows


def _inputs_row(storage: Storage, geometry: Geometry) -> MemoryRow:
    """Row of inputs' bytes that linears of one input keep each for itself: counted were joined ones."""
    read, _, alone = geometry.linear_values
    blocks = max(1, geometry.blocks)
    again = storage.recomputed or blocks if storage.checkpointing else 0
    size = (alone - read) * max(1, blocks - again) // blocks
    return MemoryRow(f"{storage.way.compute} inputs", size, "kept by each linear that reads them")


def _largest(storage: Storage, geometry: Geometry) -> int:
    """Parameters of the largest product: linears of one input are one, but for fp32 and weights in rows."""
    joined = storage.dtype == "bf16" and not storage.in_rows
    return max(geometry.quantized.largest, geometry.largest_product if joined else 0)


def _lacks_fp8(storage: Storage, geometry: Geometry) -> bool:
    """True where products are in FP8 and activations were not counted with them."""
    return bool(storage.way.compute) and (geometry.activations_fp8 is None or not storage.compile)


def gathered(storage: Storage, geometry: Geometry) -> list[MemoryRow]:
    """Whole weights and gradients of the blocks that compute, and of what lies outside of the blocks."""
    weights, gradients, *_ = states.of(storage.method, storage.dtype, storage.optimizer)
    _, outside = rows_together(geometry)
    each = [_gathered_bytes(storage, stack, weights) for stack in geometry.stacks]
    whole = _PAGES * max(each, default=0) + outside * weights
    sent = outside * gradients + _on_their_way(storage, geometry, gradients)
    return [
        MemoryRow("gathered blocks", whole, "two blocks whole, in turn, and what lies outside of blocks"),
        MemoryRow("gradients on their way", sent, "summed in fp32"),
    ]


def _on_their_way(storage: Storage, geometry: Geometry, gradients: int) -> int:
    """Bytes that a block's gradients and their sums take at the highest point of a backward pass, beyond all
    activations: whole gradients, what is sent of them in fp32, and this rank's part of the sum.

    The last blocks come first, and others take the room that activations of later ones have left. Of products
    in FP8 nothing is taken off: two H200 held 5 % more than their plan, and nobody knows what.
    """
    activations, (largest, outside) = activations_of(storage, geometry), rows_together(geometry)
    parts = {stack.name: stack.quantized.parameters + stack.others for stack in geometry.stacks}
    order = [parts[name] for name in activations.stacks] or [largest]
    again = storage.recomputed or len(order) if storage.checkpointing else 0
    kept = (*activations.recomputed.blocks[:again], *activations.whole.blocks[again:])

    def summed(count: int) -> int:
        return count * VALUE_BYTES["fp32"] + count * VALUE_BYTES["fp32"] // storage.ranks

    highest = left = 0
    for number in reversed(range(len(order))):
        highest = max(highest, order[number] * gradients + summed(order[number]) - left)
        if activations.stacks and not storage.way.compute:
            left += kept[number]
    return max(highest, summed(outside) - left)


def _gathered_bytes(storage: Storage, stack: Stack, weights: int) -> int:
    """Bytes of a block that is whole: of weights in FP8 their bytes, and one weight's room for a gradient."""
    own = stack.quantized.parameters
    if not storage.way.compute:
        return (own + stack.others) * weights
    return own + stack.others * weights + stack.quantized.largest * weights


def rows_together(geometry: Geometry) -> tuple[int, int]:
    """Parameters of the largest block, and of all that lies outside of blocks."""
    blocks = [(stack.quantized.parameters + stack.others, stack.blocks) for stack in geometry.stacks]
    outside = parameters(geometry, "trained") - sum(size * count for size, count in blocks)
    return max((size for size, _ in blocks), default=0), max(0, outside)
