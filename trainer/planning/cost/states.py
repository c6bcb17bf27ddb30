"""What one trained parameter takes in weights, gradients and the optimizer's state."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per trained parameter."""

    weights: int
    gradients: int
    optimizer: float
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
        kept_as="bf16 with flat fp32 masters",
        summed_as="bf16, summed in flat fp32",
        moments="two fp32 moments",
    ),
    ("lora", "fp16"): StateBytes(
        weights=2 + 4,
        gradients=2 + 4,
        optimizer=8,
        kept_as="fp16 with flat fp32 masters",
        summed_as="fp16, summed in flat fp32",
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


_OPTIMIZERS: dict[str, tuple[float, str]] = {
    # bitsandbytes scales 256 values together, by one fp32 number
    "adamw_8bit": (2 * (1 + 4 / 256), "two moments in 8 bits"),
    "prodigy": (16, "two fp32 moments, a sum of gradients, and where the weights started"),
}
"""Bytes of state a parameter, and what they are, where `_STATE` does not say."""
MEAN_BYTES = 4
"""Of a parameter in the running mean of the weights."""


def state_bytes(method: str, dtype: str) -> int:
    """Bytes that one trained parameter takes: its weights, gradients and AdamW's state."""
    state = _STATE[method, dtype]
    return state.weights + state.gradients + int(state.optimizer)


class Stored(Protocol):
    """The decisions that this depends on."""

    @property
    def method(self) -> str:
        """`lora` or `full`."""

    @property
    def dtype(self) -> str:
        """The run's type."""

    @property
    def optimizer(self) -> str:
        """As `train.optimizer`."""


def of(storage: Stored) -> StateBytes:
    """What the run's optimizer keeps."""
    state = _STATE[storage.method, storage.dtype]
    if storage.optimizer not in _OPTIMIZERS:
        return state
    size, moments = _OPTIMIZERS[storage.optimizer]
    return dataclasses.replace(state, optimizer=size, moments=moments)
