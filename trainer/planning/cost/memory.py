"""Predicted memory of the device and of the host, and disk of a run, in bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.planning.cost import states
from trainer.planning.plan import MemoryRow
from trainer.planning.shapes.activations import COUNTED_ATTENTION
from trainer.planning.shapes.blocks import NO_LINEARS, Linears, Stack, linears_of
from trainer.planning.shapes.geometry import ComponentGeometry, Geometry, Role
from trainer.ways.storages import ENCODERS_KEEP, VALUE_BYTES, WAYS, Way
from trainer.words.sizes import GIB

# CUDA context, its kernels, workspaces of cuBLAS and cuDNN: what nvidia-smi shows beyond torch's own
CUDA_CONTEXT_BYTES = int(0.75 * GIB)
# holes that weights leave which are quantised one at a time
_HOLES_BYTES = int(0.15 * GIB)
# share of all else that the caching allocator holds in blocks it cannot hand out
_FRAGMENTATION = 0.02
# scales of one byte that share one in fp32
_OUTER_BLOCK = 256
# resident size of Python with torch, diffusers and transformers imported, and with CUDA's libraries in use
_PROCESS_BYTES = 1 * GIB
_CUDA_PROCESS_BYTES = int(3.5 * GIB)
# what a shard passes through on its way to the device
_RING_BYTES = GIB // 2
HOST_BYTES = _CUDA_PROCESS_BYTES + _RING_BYTES
"""What the training process holds in host memory beside the device's, without blocks that wait there."""
# blocks that wait in host memory pass through two buffers
_WAITING_BUFFERS = 2
_ONE_SAMPLE = "one sample"
# bytes more of a parameter that a bf16 run keeps in fp32: frozen, and in weight, gradient and moments
_FP32_EXTRA = {"frozen": 2, "weights": 2, "gradients": 2, "optimizer": 2}


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Decisions that memory depends on."""

    method: str
    device: str
    dtype: str
    way: Way
    """How the base is stored and multiplied with."""
    checkpointing: bool
    tiling: bool
    previews: bool
    attention: str
    """The kernel: what compiled blocks keep under a budget depends on it."""
    recomputed: int = 0
    """Blocks that are recomputed with `checkpointing`, from the first on; 0: all."""
    stored: bool = False
    """The checkpoint holds weights as they are: no choice."""
    compile: bool = False
    activation_budget: float = 1.0
    text_encoders: str = ""
    """`int8` or `nf4`: storage of the text encoders' layers while captions are encoded; empty: `dtype`."""
    swapped: int = 0
    """Repeated blocks whose frozen weights wait in host memory."""
    optimizer: str = "adamw"
    """As `train.optimizer`."""
    averaged: bool = False
    """A running mean of the trained weights is kept."""

    @property
    def value_bytes(self) -> int:
        """Bytes of one value in the compute type."""
        return VALUE_BYTES[self.dtype]


def total(rows: Sequence[MemoryRow]) -> int:
    """Sum of the rows in bytes."""
    return sum(row.bytes for row in rows)


def train_rows(storage: Storage, geometry: Geometry) -> tuple[MemoryRow, ...]:
    """What training holds at its peak; previews take the place of activations, not room beside them."""
    state = states.of(storage.method, storage.dtype, storage.optimizer)
    trained = parameters(geometry, "trained")
    count = geometry.lora_parameters if storage.method == "lora" else trained
    name = "adapter" if storage.method == "lora" else "trained weights"
    more = dict.fromkeys(_FP32_EXTRA, 0)
    if storage.method == "full":
        more = {part: geometry.fp32_parameters * size for part, size in _FP32_EXTRA.items()}
    weights, gradients = count * state.weights + more["weights"], count * state.gradients + more["gradients"]
    moments = int(count * state.optimizer) + more["optimizer"]
    rows = [
        MemoryRow(name=name, bytes=weights, detail=f"{_count(count)}, {state.kept_as}"),
        MemoryRow(name="gradients", bytes=gradients, detail=state.summed_as),
        MemoryRow(name="optimizer state", bytes=moments, detail=state.moments),
        _activation_row(storage, geometry),
    ]
    if storage.averaged:
        rows.append(MemoryRow(name="EMA", bytes=count * states.MEAN_BYTES, detail="the weights' mean, fp32"))
    if storage.method == "lora":
        rows.insert(0, _base_row(storage, geometry, trained))
    if storage.swapped:
        size = _WAITING_BUFFERS * waiting_bytes(storage, geometry).largest
        detail = "two of the blocks that wait in host memory, in turn"
        rows.append(MemoryRow(name="blocks passing through", bytes=size, detail=detail))
    if not storage.way.trains:
        rows += _quantized_extra(storage, geometry)
    holes = 0 if storage.way.trains else _HOLES_BYTES
    return (*rows, *_overhead(storage, rows, holes=holes))


def cache_stages(storage: Storage, geometry: Geometry) -> dict[str, tuple[MemoryRow, ...]]:
    """Rows of the stages of caching: all text encoders together, and after them the VAE.

    A language model has neither, and one stage that makes tokens of text.
    """
    if not any(component.role != "trained" for component in geometry.components):
        return {"tokens": _overhead(storage, ())}
    vae_peak = geometry.vae_bytes_peak_tiled if storage.tiling else geometry.vae_bytes_peak
    # latents are encoded in fp32 whatever the run computes in; the geometry's peak is that of the run's type
    vae_peak = vae_peak * VALUE_BYTES["fp32"] // storage.value_bytes
    vae = parameters(geometry, "vae")
    return {
        "text encoders": text_rows(storage, geometry),
        "VAE": _stage(
            storage,
            MemoryRow(name="VAE", bytes=vae * VALUE_BYTES["fp32"], detail=f"{_count(vae)}, fp32"),
            MemoryRow(name="VAE: activations", bytes=vae_peak, detail=_ONE_SAMPLE),
        ),
    }


def text_rows(storage: Storage, geometry: Geometry) -> tuple[MemoryRow, ...]:
    """What encoding captions holds: all text encoders, as they are stored, and one caption's activations."""
    name, kind, count = "text encoders", storage.text_encoders, parameters(geometry, "text_encoder")
    peak = MemoryRow(name=f"{name}: activations", bytes=geometry.text_bytes_peak, detail=_ONE_SAMPLE)
    if not kind:
        detail = f"{_count(count)}, {storage.dtype}"
        whole = MemoryRow(name=name, bytes=count * storage.value_bytes, detail=detail)
        return _stage(storage, whole, peak)
    sizes = [size for part in _encoders(geometry) for size in _quantized(part).values()]
    linears, way = linears_of(sizes), WAYS[kind]
    packed, stored = linears.parameters, _packed_bytes(way, linears, NO_LINEARS, len(sizes))
    return _stage(
        storage,
        MemoryRow(
            name=name,
            bytes=stored + (count - packed) * storage.value_bytes,
            detail=f"{_count(packed)} in {kind}, {_count(count - packed)} in {storage.dtype}",
        ),
        MemoryRow(
            name=f"{kind} unpacked",
            bytes=min(linears.largest, way.most_unpacked or linears.largest) * way.encoder_bytes,
            detail="one weight at a time, transient",
        ),
        peak,
    )


def _stage(storage: Storage, *rows: MemoryRow) -> tuple[MemoryRow, ...]:
    return (*rows, *_overhead(storage, rows))


def _encoders(geometry: Geometry) -> list[ComponentGeometry]:
    return [part for part in geometry.components if part.role == "text_encoder"]


def _quantized(part: ComponentGeometry) -> Mapping[str, tuple[int, int]]:
    """(out, in) of the linears of a text encoder that are quantised, by name."""
    return part.quantized(ENCODERS_KEEP)


@dataclass(frozen=True, kw_only=True)
class WaitingBytes:
    """Sizes of the blocks that wait in host memory."""

    all: int
    largest: int


def waiting_bytes(storage: Storage, geometry: Geometry) -> WaitingBytes:
    """Frozen weights of `storage.swapped` blocks: all of the longest stack before any of the next."""
    left, whole, largest = storage.swapped, 0, 0
    for stack in geometry.stacks:
        count = min(left, stack.blocks)
        if count:
            size = _block_bytes(storage, geometry, stack)
            whole, largest, left = whole + count * size, max(largest, size), left - count
    return WaitingBytes(all=whole, largest=largest)


def _block_bytes(storage: Storage, geometry: Geometry, stack: Stack) -> int:
    way, modulation = storage.way, NO_LINEARS
    if _packed_modulation(way, geometry).parameters:
        modulation = stack.modulation
    own = Linears(parameters=stack.quantized, rows=stack.rows)
    kept = (stack.others - modulation.parameters) * storage.value_bytes + stack.fp32 * _FP32_EXTRA["frozen"]
    if way.trains:
        return own.parameters * storage.value_bytes + kept
    if way.layer_bytes:
        everything = max(1, packed_linears(way, geometry).parameters)
        return kept + _base_bytes(way, geometry) * (own.parameters + modulation.parameters) // everything
    return kept + _packed_bytes(way, own, modulation)


def packed_linears(way: Way, geometry: Geometry) -> Linears:
    """The linears that a base stored so holds packed."""
    return _together(_own(geometry), _packed_modulation(way, geometry))


def _own(geometry: Geometry) -> Linears:
    """The linears without those of `Family.modulation`."""
    parameters, rows = geometry.quantized_parameters, geometry.quantized_rows
    return Linears(parameters=parameters, rows=rows, largest=geometry.largest_quantized)


def _packed_modulation(way: Way, geometry: Geometry) -> Linears:
    return geometry.modulation if way.packs or way.modulation else NO_LINEARS


def _together(one: Linears, other: Linears) -> Linears:
    parameters, rows = one.parameters + other.parameters, one.rows + other.rows
    return Linears(parameters=parameters, rows=rows, largest=max(one.largest, other.largest))


def _base_bytes(way: Way, geometry: Geometry) -> int:
    """Of all packed linears, or as the checkpoint's files hold them."""
    layers = sum(len(part.linears) for part in geometry.components if part.role == "trained")
    if geometry.stored_bytes:
        return geometry.stored_bytes + layers * way.layer_bytes
    return _packed_bytes(way, _own(geometry), _packed_modulation(way, geometry), layers)


def _packed_bytes(way: Way, own: Linears, modulation: Linears, layers: int = 0) -> int:
    """Of weights stored so with their scales; modulation in a storage of its own is never kept twice."""
    if way.modulation:
        return _packed_bytes(WAYS[way.modulation], modulation, NO_LINEARS) + _packed_bytes(
            dataclasses.replace(way, modulation=""), own, NO_LINEARS, layers
        )
    linears = _together(own, modulation)
    scales = linears.parameters // way.block if way.block else 0
    values = way.copies * (linears.parameters * way.bits // 8)
    outer = scales // _OUTER_BLOCK * 4
    return values + scales + outer + linears.rows * way.row_bytes + layers * way.layer_bytes


def host_rows(storage: Storage, geometry: Geometry) -> tuple[MemoryRow, ...]:
    """What the training process holds in host memory; on a CPU that is what training holds."""
    if storage.device == "cpu":
        return ()
    detail = f"frozen weights of {storage.swapped} of {geometry.blocks} blocks, pinned"
    size = waiting_bytes(storage, geometry).all
    waiting = [MemoryRow(name="waiting blocks", bytes=size, detail=detail)] if storage.swapped else []
    return (
        *waiting,
        MemoryRow(name="process", bytes=_CUDA_PROCESS_BYTES, detail="Python, CUDA and libraries"),
        MemoryRow(name="loading", bytes=_RING_BYTES, detail="buffers that shards pass through"),
    )


def parameters(geometry: Geometry, role: Role) -> int:
    """Parameters of all components in one role."""
    return sum(component.parameters for component in geometry.components if component.role == role)


def disk_bytes(storage: Storage, geometry: Geometry, *, checkpoints: int, copies: int = 1) -> int:
    """As many checkpoints as exist at one time, and the final files in so many `copies`.

    A checkpoint holds the master weights and the optimizer's state, in the types that they train in. The
    final files are the adapter twice (diffusers and ComfyUI) or the whole model.
    """
    if storage.method == "lora":
        count, master, final = geometry.lora_parameters, 4, 2 * storage.value_bytes
    else:
        count, master, final = parameters(geometry, "trained"), storage.value_bytes, storage.value_bytes
    state = states.of(storage.method, storage.dtype, storage.optimizer)
    mean = states.MEAN_BYTES if storage.averaged else 0
    per_checkpoint = int(count * (master + state.optimizer + mean))
    return checkpoints * per_checkpoint + copies * count * final


def _base_row(storage: Storage, geometry: Geometry, trained: int) -> MemoryRow:
    """All of the base but the blocks that wait in host memory."""
    row = _whole_base_row(storage, geometry, trained)
    if not storage.swapped:
        return row
    detail = f"{row.detail}; without {storage.swapped} of {geometry.blocks} blocks"
    size = max(0, row.bytes - waiting_bytes(storage, geometry).all)
    return MemoryRow(name=row.name, bytes=size, detail=detail)


def _whole_base_row(storage: Storage, geometry: Geometry, trained: int) -> MemoryRow:
    size, extra = storage.value_bytes, geometry.fp32_parameters * _FP32_EXTRA["frozen"]
    fp32 = f", {_count(geometry.fp32_parameters)} in fp32" if geometry.fp32_parameters else ""
    way = storage.way
    if way.trains:
        detail = f"{_count(trained)}, {way.weights}{fp32}"
        return MemoryRow(name="base weights", bytes=trained * size + extra, detail=detail)
    packed = packed_linears(way, geometry).parameters
    kept, beside = trained - packed, geometry.modulation.parameters if way.modulation else 0
    parts = [f"{_count(packed - beside)} in {way.weights}{' twice' if way.copies == 2 else ''}"]
    if beside:
        parts.append(f"{_count(beside)} in {way.modulation}")
    parts.append(f"{_count(kept - geometry.fp32_parameters)} in {storage.dtype}{fp32}")
    whole = _base_bytes(way, geometry) + kept * size + extra
    return MemoryRow(name="base weights", bytes=whole, detail=", ".join(parts))


def _activation_row(storage: Storage, geometry: Geometry) -> MemoryRow:
    activations = geometry.activations_compiled if storage.compile else geometry.activations
    if storage.swapped:
        activations = dataclasses.replace(activations, recomputed=activations.outside)
    count = storage.recomputed or len(activations.whole.blocks) if storage.checkpointing else 0
    training = activations.peak(
        recomputed=count,
        budget=storage.activation_budget,
        weights=storage.way.counted_as or storage.way.weights,
        flash=storage.attention == COUNTED_ATTENTION,
    )
    detail = "saved for backward"
    if storage.checkpointing:
        detail += f", first {count} recomputed" if storage.recomputed else ", blocks recomputed"
    if storage.activation_budget < 1.0:
        detail = f"saved for backward, {storage.activation_budget:g} of what blocks compute"
    if not storage.previews:
        return MemoryRow(name="activations", bytes=training, detail=detail)
    decode = geometry.vae_bytes_peak_tiled if storage.tiling else geometry.vae_bytes_peak
    preview = parameters(geometry, "vae") * storage.value_bytes + decode
    if preview > training:
        return MemoryRow(name="activations", bytes=preview, detail="VAE and its activations in previews")
    return MemoryRow(name="activations", bytes=training, detail=f"{detail}; previews need less")


def _quantized_extra(storage: Storage, geometry: Geometry) -> list[MemoryRow]:
    """A product needs one weight unpacked, or in FP8 transposed unless a copy is kept so, and at another time
    modulation in int8 unpacked; nf4's scales are unpacked to fp32 beside it.
    """
    way, largest = storage.way, packed_linears(storage.way, geometry).largest
    name, size = f"{way.weights} unpacked", min(largest, way.most_unpacked or largest) * storage.value_bytes
    if way.block:
        size += largest // way.block * 4
    if way.compute == "fp8":
        name, size = "fp8 transposed", geometry.largest_quantized if way.copies == 1 else 0
        unpacked = geometry.modulation.largest * storage.value_bytes if way.modulation else 0
        if unpacked > size:
            name, size = f"{way.modulation} unpacked", unpacked
    return [MemoryRow(name=name, bytes=size, detail="one weight at a time, transient")] if size else []


def _overhead(storage: Storage, rows: Sequence[MemoryRow], *, holes: int = 0) -> tuple[MemoryRow, ...]:
    if storage.device == "cpu":
        return (MemoryRow(name="process", bytes=_PROCESS_BYTES, detail="Python and libraries"),)
    lost = int(total(rows) * _FRAGMENTATION) + holes
    detail = f"context and workspaces, {_FRAGMENTATION:.0%} lost between blocks"
    return (MemoryRow(name="CUDA", bytes=CUDA_CONTEXT_BYTES + lost, detail=detail),)


def _count(parameters: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f} {unit} parameters"
    return f"{parameters} parameters"
