"""How large an adapter is, and which options of training keep to the plain path."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.config.schema import LoraSection, RunConfig
from trainer.modeling.adapter.targets import pattern_value
from trainer.planning.shapes.blocks import BLOCK


def adapter_parameters(linears: Mapping[str, tuple[int, int]], pattern: str, lora: LoraSection) -> int:
    """Parameters of an adapter on every linear layer, (out, in) by name, whose name matches `pattern`."""
    expression = re.compile(pattern)
    return sum(
        _layer(lora.type, size, int(pattern_value(lora.rank_pattern, name, lora.rank)))
        for name, size in linears.items()
        if expression.fullmatch(name)
    )


def adapted_layers(linears: Mapping[str, tuple[int, int]], pattern: str) -> int:
    """How many of the linear layers have a name that matches `pattern`."""
    expression = re.compile(pattern)
    return sum(1 for name in linears if expression.fullmatch(name))


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


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that an adapter holds besides what a plain LoRA of the rank that was counted does."""

    blocks: Mapping[str, int]
    """Of the largest block of each stack, for backward."""
    beyond: int
    """Of the largest layer, while it computes."""


NOTHING_KEPT = Kept(blocks={}, beyond=0)
COUNTED_RANK = 16
"""Of the plain LoRA that activations are counted with."""
_MOST_JOINED = 3
"""Layers that share an input: queries, keys and values."""


def kept_bytes(
    linears: Mapping[str, tuple[int, int]],
    pattern: str,
    lora: LoraSection,
    tokens_of: Callable[[str], int],
    value_bytes: int,
) -> Kept:
    """What peft's layers hold for `lora.type` and `lora.dropout`, counted as what autograd saves of one.

    DoRA: the base's output and the adapter's; while it computes its change, the changed weight and what they
    are made of. LoKr: the change, as large as the weight. Dropout: the input that is left, and its mask. A
    plain LoRA of a higher rank than was counted: the inner values, and of layers that share an input their
    right sides in one matrix, which is mostly zeros.
    """
    expression, blocks, beyond = re.compile(pattern), dict[str, int](), 0
    adapted = {name: size for name, size in linears.items() if expression.fullmatch(name)}
    siblings = Counter((name.rpartition(".")[0], size, tokens_of(name)) for name, size in adapted.items())
    for name, (out, into) in adapted.items():
        tokens, kept = tokens_of(name), 0
        if lora.type == "lora":
            more = max(0, int(pattern_value(lora.rank_pattern, name, lora.rank)) - COUNTED_RANK)
            alike = min(_MOST_JOINED, siblings[name.rpartition(".")[0], (out, into), tokens])
            kept += more * (tokens + (alike * out if alike > 1 else 0)) * value_bytes
        if lora.type == "dora":
            kept += 2 * tokens * out * value_bytes
            beyond = max(beyond, (3 * out * into + into * into) * value_bytes)
        elif lora.type == "lokr":
            kept += out * into * value_bytes
            beyond = max(beyond, 3 * out * into * value_bytes)
        if lora.dropout:
            kept += tokens * into * (value_bytes + 1)
        block = BLOCK.match(name)
        key = "" if block is None else block[1]
        blocks[key] = blocks.get(key, 0) + kept
    outside = blocks.pop("", 0)
    largest: dict[str, int] = {}
    for key, size in blocks.items():
        stack = key.rpartition(".")[0]
        largest[stack] = max(largest.get(stack, 0), size)
    return Kept(blocks=largest, beyond=beyond + outside)


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
