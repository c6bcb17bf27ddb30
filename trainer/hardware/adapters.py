"""Floor 2: how large an adapter is, and which options of training keep to the plain path."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from trainer.config.schema import LoraSection, RunConfig


def pattern_value(pattern: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first key that a module's name ends with, as peft reads `rank_pattern`."""
    found = (value for key, value in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module))
    return next(found, default)


def adapter_parameters(linears: Mapping[str, tuple[int, int]], pattern: str, lora: LoraSection) -> int:
    """Parameters of an adapter on every linear layer, (out, in) by name, whose name matches `pattern`."""
    expression = re.compile(pattern)
    return sum(
        _layer(lora.type, size, int(pattern_value(lora.rank_pattern, name, lora.rank)))
        for name, size in linears.items()
        if expression.fullmatch(name)
    )


def _layer(kind: str, size: tuple[int, int], rank: int) -> int:
    out, into = size
    if kind != "lokr":
        return rank * (out + into) + (out if kind == "dora" else 0)
    (left_out, right_out), (left_in, right_in) = _near_square(out), _near_square(into)
    # peft keeps the right factor whole where two of this rank would not be smaller
    whole = rank >= max(right_out, right_in) / 2
    right = right_out * right_in if whole else rank * (right_out + right_in)
    return left_out * left_in + right


def _near_square(dimension: int) -> tuple[int, int]:
    """The two factors nearest each other, the smaller one first: peft's with decompose_factor -1."""
    first = next(n for n in range(math.isqrt(dimension), 0, -1) if dimension % n == 0)
    return first, dimension // first


def plain_path(config: RunConfig) -> str:
    """The option because of which blocks are neither compiled nor wait in host memory; empty without one.

    What makes a run fast was tuned and proved for plain LoRA in bf16.
    """
    if config.method == "lora" and config.lora.type != "lora":
        return f"lora.type: {config.lora.type}"
    if config.method == "lora" and config.lora.dropout:
        return f"lora.dropout: {config.lora.dropout:g}"
    return "model.dtype: fp16" if config.model.dtype == "fp16" else ""


def needs_whole_base(config: RunConfig) -> bool:
    """Whether the adapter wants weights that are not quantised: the file could not be proved on others."""
    return config.method == "lora" and config.lora.type != "lora"
