"""Floor 2: predicted device memory and disk of a run, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.hardware.geometry import Geometry, Role, linear_weights
from trainer.hardware.plan import MemoryRow

GIB = 1024**3
VALUE_BYTES = {"bf16": 2, "fp32": 4}
QUANTIZED = ("int8", "nf4")
"""Storages of a frozen base, the more precise first."""
# CUDA context with its loaded kernels, and workspaces of cuBLAS and cuDNN: what nvidia-smi shows beyond
# torch's own
_CUDA_OVERHEAD_BYTES = int(0.75 * GIB)
# share of all else that the caching allocator holds in blocks it cannot hand out
_FRAGMENTATION = 0.02
# nf4 has one byte of scale a block of values, and one fp32 scale a block of those; code tables and offset of
# each weight are tiny, but the allocator gives out 512 bytes at least
_NF4_BLOCK, _NF4_OUTER_BLOCK = 64, 256
_NF4_TABLE_BYTES = 2048
# resident size of Python with torch, diffusers and transformers imported
_PROCESS_BYTES = 1 * GIB


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Decisions that memory depends on."""

    method: str
    device: str
    dtype: str
    weights: str
    checkpointing: bool
    tiling: bool
    previews: bool
    random_weights: bool
    """A random base is built in `dtype` on the device before it is quantised."""
    stored: bool = False
    """The checkpoint holds `weights` as they are: no choice."""

    @property
    def value_bytes(self) -> int:
        """Bytes of one value in the compute type."""
        return VALUE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per trained parameter."""

    weights: int
    gradients: int
    optimizer: int
    kept_as: str
    summed_as: str
    moments: str


_FP32 = StateBytes(
    weights=4, gradients=4, optimizer=8, kept_as="fp32", summed_as="fp32", moments="two fp32 moments"
)
_STATE: dict[tuple[str, str], StateBytes] = {
    ("lora", "bf16"): StateBytes(
        weights=2 + 4,
        gradients=2 + 4,
        optimizer=8,
        kept_as="bf16 with fp32 masters",
        summed_as="bf16, summed in fp32",
        moments="two fp32 moments",
    ),
    ("lora", "fp32"): _FP32,
    ("full", "bf16"): StateBytes(
        weights=2,
        gradients=2,
        optimizer=6,
        kept_as="bf16",
        summed_as="bf16",
        moments="two bf16 moments and the compensation",
    ),
    ("full", "fp32"): _FP32,
}


def state_bytes(method: str, dtype: str) -> int:
    """Bytes that one trained parameter takes: its weights, gradients and the optimizer's state."""
    state = _STATE[method, dtype]
    return state.weights + state.gradients + state.optimizer


def total(rows: Sequence[MemoryRow]) -> int:
    """Sum of the rows in bytes."""
    return sum(row.bytes for row in rows)


def train_rows(storage: Storage, geometry: Geometry) -> tuple[MemoryRow, ...]:
    """What training holds at its peak; previews take the place of activations, not room beside them."""
    state = _STATE[storage.method, storage.dtype]
    trained = parameters(geometry, "trained")
    count = geometry.lora_parameters if storage.method == "lora" else trained
    name = "adapter" if storage.method == "lora" else "trained weights"
    rows = [
        MemoryRow(name=name, bytes=count * state.weights, detail=f"{_count(count)}, {state.kept_as}"),
        MemoryRow(name="gradients", bytes=count * state.gradients, detail=state.summed_as),
        MemoryRow(name="optimizer state", bytes=count * state.optimizer, detail=state.moments),
        _activation_row(storage, geometry),
    ]
    if storage.method == "lora":
        rows.insert(0, _base_row(storage, geometry, trained))
    if storage.weights in QUANTIZED:
        rows += _quantized_extra(storage, geometry, trained, rows)
    return (*rows, *_overhead(storage, rows))


def cache_stages(storage: Storage, geometry: Geometry) -> dict[str, tuple[MemoryRow, ...]]:
    """Rows of the stages of caching: all text encoders together, and after them the VAE.

    A language model has neither, and one stage that makes tokens of text.
    """
    if not any(component.role != "trained" for component in geometry.components):
        return {"tokens": _overhead(storage, ())}
    vae_peak = geometry.vae_bytes_peak_tiled if storage.tiling else geometry.vae_bytes_peak
    # latents are encoded in fp32 whatever the run computes in; the geometry's peak is that of the run's type
    vae_peak = vae_peak * VALUE_BYTES["fp32"] // storage.value_bytes
    stages: dict[str, tuple[Role, int, str]] = {
        "text encoders": ("text_encoder", geometry.text_bytes_peak, storage.dtype),
        "VAE": ("vae", vae_peak, "fp32"),
    }
    result = {}
    for name, (role, peak, dtype) in stages.items():
        count = parameters(geometry, role)
        rows = [
            MemoryRow(name=name, bytes=count * VALUE_BYTES[dtype], detail=f"{_count(count)}, {dtype}"),
            MemoryRow(name=f"{name}: activations", bytes=peak, detail="one sample"),
        ]
        result[name] = (*rows, *_overhead(storage, rows))
    return result


def parameters(geometry: Geometry, role: Role) -> int:
    """Parameters of all components in one role."""
    return sum(component.parameters for component in geometry.components if component.role == role)


def disk_bytes(storage: Storage, geometry: Geometry, *, checkpoints: int) -> int:
    """As many checkpoints as exist at one time, and the final files.

    A checkpoint holds the master weights and the optimizer's state, in the types that they train in. The
    final files are the adapter twice (diffusers and ComfyUI) or the whole model.
    """
    if storage.method == "lora":
        count, master, final = geometry.lora_parameters, 4, 2 * storage.value_bytes
    else:
        count, master, final = parameters(geometry, "trained"), storage.value_bytes, storage.value_bytes
    per_checkpoint = count * (master + _STATE[storage.method, storage.dtype].optimizer)
    return checkpoints * per_checkpoint + count * final


def _base_row(storage: Storage, geometry: Geometry, trained: int) -> MemoryRow:
    size = storage.value_bytes
    if storage.weights not in QUANTIZED:
        return MemoryRow(
            name="base weights", bytes=trained * size, detail=f"{_count(trained)}, {storage.weights}"
        )
    packed, kept = geometry.quantized_parameters, trained - geometry.quantized_parameters
    quantized = packed + geometry.quantized_rows * size if storage.weights == "int8" else _nf4_bytes(geometry)
    return MemoryRow(
        name="base weights",
        bytes=quantized + kept * size,
        detail=f"{_count(packed)} in {storage.weights}, {_count(kept)} in {storage.dtype}",
    )


def _nf4_bytes(geometry: Geometry) -> int:
    """Half a byte a value, with double quantised scales; or what the checkpoint's files hold."""
    tables = sum(len(sizes) for sizes in _trained_matrices(geometry)) * _NF4_TABLE_BYTES
    if geometry.stored_bytes:
        return geometry.stored_bytes + tables
    count = geometry.quantized_parameters
    scales = count // _NF4_BLOCK
    return count // 2 + scales + scales // _NF4_OUTER_BLOCK * 4 + tables


def _trained_matrices(geometry: Geometry) -> list[dict[str, tuple[int, int]]]:
    return [linear_weights(part.shapes) for part in geometry.components if part.role == "trained"]


def _activation_row(storage: Storage, geometry: Geometry) -> MemoryRow:
    training = {
        (False, False): geometry.activation_bytes,
        (False, True): geometry.activation_bytes_checkpointed,
        (True, False): geometry.activation_bytes_int8,
        (True, True): geometry.activation_bytes_checkpointed_int8,
    }[storage.weights == "int8", storage.checkpointing]
    detail = "saved for backward, blocks recomputed" if storage.checkpointing else "saved for backward"
    if not storage.previews:
        return MemoryRow(name="activations", bytes=training, detail=detail)
    decode = geometry.vae_bytes_peak_tiled if storage.tiling else geometry.vae_bytes_peak
    preview = parameters(geometry, "vae") * storage.value_bytes + decode
    if preview > training:
        return MemoryRow(name="activations", bytes=preview, detail="VAE and its activations in previews")
    return MemoryRow(name="activations", bytes=training, detail=f"{detail}; previews need less")


def _quantized_extra(
    storage: Storage, geometry: Geometry, trained: int, rows: Sequence[MemoryRow]
) -> list[MemoryRow]:
    """Both libraries multiply with an unpacked copy of one weight; a random base exists in full before that.

    nf4's scales are unpacked to fp32 beside it. Its layers keep no inputs for backward, those of int8 do.
    """
    matrices = _trained_matrices(geometry)
    largest = max((out * into for sizes in matrices for out, into in sizes.values()), default=0)
    scales = largest // _NF4_BLOCK * 4 if storage.weights == "nf4" else 0
    extra = [
        MemoryRow(
            name=f"{storage.weights} unpacked",
            bytes=largest * storage.value_bytes + scales,
            detail="one weight at a time, transient",
        )
    ]
    building = trained * storage.value_bytes - total([*rows, *extra])
    if storage.random_weights and building > 0:
        detail = f"a random base is built in {storage.dtype} before it is quantised"
        extra.append(MemoryRow(name="while building", bytes=building, detail=detail))
    return extra


def _overhead(storage: Storage, rows: Sequence[MemoryRow]) -> tuple[MemoryRow, ...]:
    if storage.device == "cpu":
        return (MemoryRow(name="process", bytes=_PROCESS_BYTES, detail="Python and libraries"),)
    lost = int(total(rows) * _FRAGMENTATION)
    detail = f"context and workspaces, {_FRAGMENTATION:.0%} lost between blocks"
    return (MemoryRow(name="CUDA", bytes=_CUDA_OVERHEAD_BYTES + lost, detail=detail),)


def _count(parameters: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f} {unit} parameters"
    return f"{parameters} parameters"
