"""Bytes of one trained parameter: in weights, gradients and the optimizer's state, and passed by a step."""

from __future__ import annotations

MEAN_BYTES = 4
"""Bytes of a parameter in the running mean of the weights."""
State = tuple[int, int, float, str, str, str]
"""Bytes of a parameter in weights, in gradients and in the optimizer's state, and what each of them is."""

_MOMENTS = "two fp32 moments"
_FP32: State = (4, 4, 8, "fp32", "fp32", _MOMENTS)
_STATE: dict[tuple[str, str], State] = {
    ("lora", "bf16"): (6, 6, 8, "bf16 with flat fp32 masters", "bf16, summed in flat fp32", _MOMENTS),
    ("lora", "fp16"): (6, 6, 8, "fp16 with flat fp32 masters", "fp16, summed in flat fp32", _MOMENTS),
    ("lora", "fp32"): _FP32,
    ("full", "bf16"): (2, 2, 6, "bf16", "bf16", "two moments and what rounding left, 16 bits each"),
    ("full", "fp32"): _FP32,
}
_OPTIMIZERS: dict[str, tuple[float, str]] = {
    # bitsandbytes scales 256 values together, by one fp32 number
    "adamw_8bit": (2 * (1 + 4 / 256), "two moments in 8 bits"),
    "adamw_stochastic_bf16": (4, "two moments, 16 bits each; no masters"),
    "prodigy": (16, "two fp32 moments, a sum of gradients, and where the weights started"),
}
"""Bytes of state a parameter, and what they are, where `_STATE` does not say."""


def of(method: str, dtype: str, optimizer: str) -> State:
    """The state of a run with this method, type and `train.optimizer`."""
    weights, gradients, size, kept_as, summed_as, moments = _STATE[method, dtype]
    size, moments = _OPTIMIZERS.get(optimizer, (size, moments))
    return weights, gradients, size, kept_as, summed_as, moments


_PASSED: dict[str, tuple[float, float]] = {
    # the gradient for the norm 2; then one kernel reads and writes weight, moments and what rounding left,
    # and reads the gradient, 18: 5.37 ms for 1.07 B parameters on the H200
    "adamw_split_bf16": (20, 0.833),
    # the same without what rounding left; not measured
    "adamw_stochastic_bf16": (16, 0.833),
    # in fp32, norm 4 and clipped 8; these were not measured
    "adamw_fused_fp32": (40, 0.73),
    "adamw_8bit": (28, 0.73),
    "prodigy": (84, 0.73),
}
"""Bytes of a parameter that a step passes through the device's memory, and the share of the memory's rate
that it reaches, by the optimizer's name in the plan.
"""
_MEAN_PASSED = 18
"""Bytes more for the running mean: an fp32 copy of the weight is made, and the mean read and written."""


def passed(optimizer: str, *, averaged: bool) -> tuple[float, float]:
    """(bytes of a parameter that a step passes through the memory, share of the memory's rate)."""
    size, share = _PASSED[optimizer]
    return size + _MEAN_PASSED * averaged, share
