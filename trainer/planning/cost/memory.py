"""Predicted memory of the device and of the host, in bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainer.planning.cost import states, trained_memory
from trainer.planning.cost.storage import Storage, counted, linear_bytes, parameters
from trainer.planning.cost.trained_memory import FP32_MORE_BYTES
from trainer.planning.plan import MemoryRow
from trainer.planning.shapes.activations import COUNTED_ATTENTION
from trainer.planning.shapes.geometry import Geometry, Linears, Stack, fp32_parameters, linears_of, parted
from trainer.ways.storages import ENCODERS_FP32_IN_FP16, ENCODERS_KEEP, VALUE_BYTES, WAYS, Way
from trainer.words.sizes import GIB

# CUDA context, its kernels, workspaces of cuBLAS and cuDNN: what nvidia-smi shows beyond torch's own
CUDA_CONTEXT_BYTES = int(0.75 * GIB)
# holes that weights leave which are quantised one at a time
_HOLES_BYTES = int(0.15 * GIB)
# share of all else that the caching allocator holds in blocks it cannot hand out
_FRAGMENTATION = 0.02
# resident size of Python with torch, diffusers and transformers imported, and with CUDA's libraries in use
_PROCESS_BYTES = 1 * GIB
_CUDA_PROCESS_BYTES = int(3.5 * GIB)
# buffers that a shard passes through on its way to the device
_RING_BYTES = GIB // 2
HOST_BYTES = _CUDA_PROCESS_BYTES + _RING_BYTES
"""Host memory of a process that trains on a GPU, without blocks that wait there."""
# blocks that lie elsewhere pass through so many pages of the device's memory
_PAGES = 2
_ONE_SAMPLE, _ONE_WEIGHT = "one sample", "one weight at a time, transient"


def total(rows: Sequence[MemoryRow]) -> int:
    """Sum of the rows in bytes."""
    return sum(row.bytes for row in rows)


def train_rows(storage: Storage, geometry: Geometry) -> tuple[MemoryRow, ...]:
    """Memory of training at its peak; previews take the place of activations, not room beside them."""
    state = states.of(storage.method, storage.dtype, storage.optimizer)
    weights, gradients, optimizer, kept, summed, moments = state
    lora, trained = storage.method == "lora", parameters(geometry, "trained")
    name, count = ("adapter", geometry.lora_parameters) if lora else ("trained weights", trained)
    more = 0 if lora else geometry.fp32_parameters * FP32_MORE_BYTES
    if storage.in_rows:
        count, more = -(-count // storage.ranks), -(-more // storage.ranks)
        kept = f"{kept}, the rows of one of {storage.ranks} GPUs"
    rows = [
        *([_base_row(storage, geometry, trained)] if lora else []),
        MemoryRow(name, count * weights + more, f"{counted(count)}, {kept}"),
        MemoryRow("gradients", (of_all := count * gradients + more), summed),
        MemoryRow("optimizer state", int(count * optimizer) + more, moments),
        _activation_row(storage, geometry, of_all),
    ]
    if storage.averaged:
        rows.append(MemoryRow("EMA", count * states.MEAN_BYTES, "the weights' mean, fp32"))
    if storage.in_rows:
        rows += trained_memory.gathered(storage, geometry)
    elif storage.ranks > 1:
        sums = count * VALUE_BYTES["fp32"]
        # slices sent and received; sums of all slices, twice as they are gathered, and of this one
        size = 2 * count * storage.value_bytes + 2 * sums + sums // storage.ranks
        rows.append(MemoryRow("exchange", size, f"gradients on their way between {storage.ranks} GPUs"))
    if storage.swapped or storage.sharded:
        rows.append(_passing_row(storage, geometry))
    if storage.way.trains:
        return _with_overhead(storage, [*rows, *trained_memory.fp8_rows(storage, geometry)])
    return _with_overhead(storage, [*rows, *_unpacked(storage, geometry)], holes=_HOLES_BYTES)


def cache_stages(storage: Storage, geometry: Geometry) -> dict[str, tuple[MemoryRow, ...]]:
    """Rows of the stages of caching: all text encoders together, and after them the VAE.

    A language model has neither, and one stage that makes tokens of text.
    """
    if not any(component.role != "trained" for component in geometry.components):
        return {"tokens": _with_overhead(storage, [])}
    # latents are encoded in fp32 whatever the run computes in; the geometry's peak is that of the run's type
    size, vae = VALUE_BYTES["fp32"], parameters(geometry, "vae")
    peak = _vae_peak(storage, geometry) * size // storage.value_bytes
    rows = [MemoryRow("VAE", vae * size, f"{counted(vae)}, fp32")]
    rows.append(MemoryRow("VAE: activations", peak, _ONE_SAMPLE))
    return {"text encoders": text_rows(storage, geometry), "VAE": _with_overhead(storage, rows)}


def text_rows(storage: Storage, geometry: Geometry) -> tuple[MemoryRow, ...]:
    """Memory of encoding captions: all text encoders, as they are stored, and one caption's activations."""
    name, kind, count = "text encoders", storage.text_encoders, parameters(geometry, "text_encoder")
    parts = [part for part in geometry.components if part.role == "text_encoder"]
    peak = MemoryRow(f"{name}: activations", geometry.text_bytes_peak, _ONE_SAMPLE)
    kept = ENCODERS_FP32_IN_FP16 if storage.dtype == "fp16" else ()
    fp32 = sum(fp32_parameters(part.shapes, kept) for part in parts)
    more, among = fp32 * FP32_MORE_BYTES, f", {counted(fp32)} of them in fp32" if fp32 else ""
    if not kind:
        detail = f"{counted(count)}, {storage.dtype}{among}"
        whole = MemoryRow(name, count * storage.value_bytes + more, detail)
        return _with_overhead(storage, [whole, peak])
    sizes = [size for part in parts for size in parted(part, ENCODERS_KEEP)[1].values()]
    linears, way = linears_of(sizes), WAYS[kind]
    packed, largest = linears.parameters, linears.largest
    stored = linear_bytes(way, linears, len(sizes)) + (count - packed) * storage.value_bytes + more
    detail = f"{counted(packed)} in {kind}, {counted(count - packed)} in {storage.dtype}{among}"
    unpacked = min(largest, way.most_unpacked or largest) * way.encoder_bytes
    rows = [MemoryRow(name, stored, detail), MemoryRow(f"{kind} unpacked", unpacked, _ONE_WEIGHT), peak]
    return _with_overhead(storage, rows)


def elsewhere_bytes(storage: Storage, geometry: Geometry) -> tuple[int, int]:
    """Frozen weights of the blocks that wait in host memory or lie with several GPUs, (all, the largest).

    They are of the longest stack before the next.
    """
    left, whole, largest = storage.swapped or storage.sharded, 0, 0
    for stack in geometry.stacks:
        count = min(left, stack.blocks)
        if count:
            size = _block_bytes(storage, geometry, stack)
            whole, largest, left = whole + count * size, max(largest, size), left - count
    return whole, largest


def read_bytes(storage: Storage, geometry: Geometry) -> tuple[int, int]:
    """Bytes that a (forward, backward) pass copies of the blocks that lie elsewhere.

    Modulation has no gradient below it, so that backward reads none of it.
    """
    whole, _ = elsewhere_bytes(_read_once(storage), geometry)
    if not storage.parts_by_use:
        return whole, whole
    left, modulation = storage.swapped or storage.sharded, 0
    for stack in geometry.stacks:
        count = min(left, stack.blocks)
        left, modulation = left - count, modulation + count * _modulation_bytes(storage, stack)
    return whole, whole - modulation


def _read_once(storage: Storage) -> Storage:
    """The setting with the copy of each weight that one pass reads."""
    if not storage.parts_by_use:
        return storage
    return dataclasses.replace(storage, way=dataclasses.replace(storage.way, copies=1))


def _modulation_bytes(storage: Storage, stack: Stack) -> int:
    way = WAYS[storage.way.modulation] if storage.way.modulation else storage.way
    if way.packs:
        return linear_bytes(way, stack.modulation)
    return stack.modulation.parameters * storage.value_bytes


def _block_bytes(storage: Storage, geometry: Geometry, stack: Stack) -> int:
    way, own, packed = storage.way, stack.quantized.parameters, packed_linears(storage.way, stack)
    kept = (stack.others + own - packed.parameters) * storage.value_bytes + stack.fp32 * FP32_MORE_BYTES
    if way.trains:
        return own * storage.value_bytes + kept
    if way.layer_bytes:
        every = max(1, packed_linears(way, geometry).parameters)
        return kept + _base_bytes(way, geometry) * packed.parameters // every
    return kept + _packed_bytes(way, stack)


def packed_linears(way: Way, part: Geometry | Stack) -> Linears:
    """The linears that a base stored so holds packed."""
    return part.quantized + part.modulation if way.packs or way.modulation else part.quantized


def _base_bytes(way: Way, geometry: Geometry) -> int:
    """Bytes of all packed linears, or as the checkpoint's files hold them."""
    layers = sum(len(part.linears) for part in geometry.components if part.role == "trained")
    if geometry.stored_bytes:
        return geometry.stored_bytes + layers * way.layer_bytes
    return _packed_bytes(way, geometry, layers)


def _packed_bytes(way: Way, part: Geometry | Stack, layers: int = 0) -> int:
    """Bytes of packed weights; modulation in a storage of its own is never kept twice."""
    own = part.quantized if way.modulation else packed_linears(way, part)
    beside = linear_bytes(WAYS[way.modulation], part.modulation) if way.modulation else 0
    return linear_bytes(way, own, layers) + beside


def host_rows(storage: Storage, geometry: Geometry) -> tuple[MemoryRow, ...]:
    """Host memory of a machine's training processes; none on a CPU, where all that training holds is that.

    Each process has its own libraries and buffers; blocks that wait are there once for all.
    """
    if storage.device == "cpu":
        return ()
    ranks, (size, _) = storage.ranks_here, elsewhere_bytes(storage, geometry)
    each = f", for each of {ranks} processes" if ranks > 1 else ""
    once = f", once for {ranks} processes" if ranks > 1 else ""
    detail = f"frozen weights of {storage.swapped} of {geometry.blocks} blocks, pinned{once}"
    return (
        *([MemoryRow("waiting blocks", size, detail)] if storage.swapped else []),
        MemoryRow("process", ranks * _CUDA_PROCESS_BYTES, f"Python, CUDA and libraries{each}"),
        MemoryRow("loading", ranks * _RING_BYTES, f"buffers that shards pass through{each}"),
    )


def _base_row(storage: Storage, geometry: Geometry, trained: int) -> MemoryRow:
    """Row of the base on the device, without the blocks that wait in host memory."""
    way, kept_fp32 = storage.way, geometry.fp32_parameters
    fp32 = f", {counted(kept_fp32)} in fp32" if kept_fp32 else ""
    packed = 0 if way.trains else packed_linears(way, geometry).parameters
    size = (trained - packed) * storage.value_bytes + kept_fp32 * FP32_MORE_BYTES
    detail = f"{counted(trained)}, {way.weights}{fp32}"
    if not way.trains:
        size += _base_bytes(way, geometry)
        beside = geometry.modulation.parameters if way.modulation else 0
        twice = " twice" if way.copies == 2 else ""
        parts = [f"{counted(packed - beside)} in {way.weights}{twice}"]
        parts += [f"{counted(beside)} in {way.modulation}"] if beside else []
        parts.append(f"{counted(trained - packed - kept_fp32)} in {storage.dtype}{fp32}")
        detail = ", ".join(parts)
    if storage.swapped:
        size = max(0, size - elsewhere_bytes(storage, geometry)[0])
        detail += f"; without {storage.swapped} of {geometry.blocks} blocks"
    if storage.sharded:
        whole, _ = elsewhere_bytes(storage, geometry)
        others = storage.sharded - -(-storage.sharded // storage.group)
        size = max(0, size - whole + _own_bytes(storage, geometry))
        detail += f"; without {others} of {geometry.blocks} blocks"
    return MemoryRow("base weights", size, detail)


def _own_bytes(storage: Storage, geometry: Geometry) -> int:
    """Bytes of the shared blocks that lie with the GPU which has most of them: each has one in turn."""
    whole, largest = elsewhere_bytes(storage, geometry)
    order, group = trained_memory.activations_of(storage, geometry).stacks, storage.group
    if storage.sharded < len(order) or not order:
        # some of the longest stack: one GPU may have one more than others
        return min(whole, whole // group + largest * (group > 1))
    sizes = {stack.name: _block_bytes(storage, geometry, stack) for stack in geometry.stacks}
    each = [sizes[name] for name in order]
    return max(sum(each[first::group]) for first in range(group))


def _passing_row(storage: Storage, geometry: Geometry) -> MemoryRow:
    """Row of the pages that blocks pass through which lie elsewhere, at the highest point of a step.

    That is in the last stack, where all activations are held: pages of larger blocks before it come when the
    activations of the blocks after them are gone.
    """
    once = _read_once(storage)
    _, largest = elsewhere_bytes(once, geometry)
    where = "wait in host memory" if storage.swapped else "lie with other GPUs"
    detail = f"two of the blocks that {where}, in turn"
    # where the passes meet, both copies of the last block
    pages = _PAGES + (storage.parts_by_use and storage.way.copies == 2)
    activations = trained_memory.activations_of(storage, geometry)
    size, order = pages * largest, activations.stacks
    if storage.sharded and storage.sharded >= len(order) > 0:
        sizes = {stack.name: _block_bytes(once, geometry, stack) for stack in geometry.stacks}
        # the least that blocks keep in any way
        kept = activations.recomputed.blocks
        size = max(pages * sizes[name] - sum(kept[after:]) for after, name in enumerate(order, 1))
    return MemoryRow("blocks passing through", size, detail)


def _activation_row(storage: Storage, geometry: Geometry, gradients: int) -> MemoryRow:
    """Row of activations, or of previews; `gradients` are the bytes of all that a step holds."""
    activations = trained_memory.activations_of(storage, geometry)
    if storage.swapped:
        activations = dataclasses.replace(activations, recomputed=activations.outside)
    count = storage.recomputed or len(activations.whole.blocks) if storage.checkpointing else 0
    training = activations.peak(
        recomputed=count,
        budget=storage.activation_budget,
        weights=storage.way.counted_as or storage.way.weights,
        flash=storage.attention == COUNTED_ATTENTION,
        twice=storage.way.copies == 2 and not storage.way.trains,
    )
    detail = "saved for backward"
    if storage.checkpointing:
        detail += f", first {count} recomputed" if storage.recomputed else ", blocks recomputed"
    if storage.activation_budget < 1.0:
        detail = f"saved for backward, {storage.activation_budget:g} of what blocks compute"
    alone = storage.method == "full" and not storage.in_rows
    if alone:
        training, words = trained_memory.beside_gradients(storage, geometry)
        detail += words
    if not storage.previews:
        return MemoryRow("activations", training, detail)
    preview = parameters(geometry, "vae") * storage.value_bytes + _vae_peak(storage, geometry)
    if alone and not storage.averaged:
        # between steps there are no gradients; with a mean the weights themselves wait in their place
        preview = max(0, preview - gradients)
    if preview > training:
        return MemoryRow("activations", preview, "VAE and its activations in previews")
    return MemoryRow("activations", training, f"{detail}; previews need less")


def _vae_peak(storage: Storage, geometry: Geometry) -> int:
    return geometry.vae_bytes_peak_tiled if storage.tiling else geometry.vae_bytes_peak


def _unpacked(storage: Storage, geometry: Geometry) -> list[MemoryRow]:
    """A product needs one weight unpacked, or in a type of its own transposed unless a copy is kept so, and
    at another time modulation in int8 unpacked; nf4's scales are unpacked to fp32 beside it.
    """
    way, largest = storage.way, packed_linears(storage.way, geometry).largest
    name, size = f"{way.weights} unpacked", min(largest, way.most_unpacked or largest) * storage.value_bytes
    if way.block:
        size += largest // way.block * 4
    if way.compute:
        name, size = f"{way.compute} transposed", geometry.quantized.largest if way.copies == 1 else 0
        unpacked = geometry.modulation.largest * storage.value_bytes if way.modulation else 0
        if unpacked > size:
            name, size = f"{way.modulation} unpacked", unpacked
    return [MemoryRow(name, size, _ONE_WEIGHT)] if size else []


def _with_overhead(storage: Storage, rows: Sequence[MemoryRow], *, holes: int = 0) -> tuple[MemoryRow, ...]:
    """The rows with one of the process, or of CUDA."""
    if storage.device == "cpu":
        return (*rows, MemoryRow("process", _PROCESS_BYTES, "Python and libraries"))
    size = CUDA_CONTEXT_BYTES + int(total(rows) * _FRAGMENTATION) + holes
    detail = f"context and workspaces, {_FRAGMENTATION:.0%} lost between blocks"
    return (*rows, MemoryRow("CUDA", size, detail))
