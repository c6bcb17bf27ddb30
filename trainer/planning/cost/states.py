"""Bytes of one trained parameter in weights, gradients and the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass, replace

MEAN_BYTES = 4
"""Bytes of a parameter in the running mean of the weights."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per trained parameter, and in words what they are."""

    weights: int
    gradients: int
    optimizer: float
    kept_as: str
    summed_as: str
    moments: str = "two fp32 moments"


_FP32 = StateBytes(weights=4, gradients=4, optimizer=8, kept_as="fp32", summed_as="fp32")
_MASTERS = {
    ("lora", dtype): StateBytes(
        weights=2 + 4,
        gradients=2 + 4,
        optimizer=8,
        kept_as=f"{dtype} with flat fp32 masters",
        summed_as=f"{dtype}, summed in flat fp32",
    )
    for dtype in ("bf16", "fp16")
}
_KAHAN = StateBytes(
    weights=2,
    gradients=2,
    optimizer=6,
    kept_as="bf16",
    summed_as="bf16",
    moments="two bf16 moments and the compensation",
)
_STATE = {**_MASTERS, ("lora", "fp32"): _FP32, ("full", "bf16"): _KAHAN, ("full", "fp32"): _FP32}
_OPTIMIZERS: dict[str, tuple[float, str]] = {
    # bitsandbytes scales 256 values together, by one fp32 number
    "adamw_8bit": (2 * (1 + 4 / 256), "two moments in 8 bits"),
    "prodigy": (16, "two fp32 moments, a sum of gradients, and where the weights started"),
}
"""Bytes of state a parameter, and what they are, where `_STATE` does not say."""


def of(method: str, dtype: str, optimizer: str) -> StateBytes:
    """The state of a run with this method, type and `train.optimizer`."""
    state = _STATE[method, dtype]
    size, moments = _OPTIMIZERS.get(optimizer, (state.optimizer, state.moments))
    return replace(state, optimizer=size, moments=moments)


def state_bytes(method: str, dtype: str) -> int:
    """Bytes that one trained parameter takes: its weights, gradients and AdamW's state."""
    state = _STATE[method, dtype]
    return state.weights + state.gradients + int(state.optimizer)
