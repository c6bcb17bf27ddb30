"""The adapter that a configuration asks for on a model's layers, and what keeps to the plain path."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainer.config.schema import LoraSection, RunConfig
from trainer.families.family import Family
from trainer.families.values import Shape
from trainer.modeling.adapter.targets import pattern_value, target_pattern
from trainer.planning.shapes.activations import NOTHING_KEPT, Kept, Spared
from trainer.planning.shapes.geometry import ComponentGeometry, Size, by_block, parted

COUNTED_RANK = 16
"""Rank of the plain LoRA that activations are counted with."""
_MOST_JOINED = 3
"""Layers that share an input: queries, keys and values."""
# diffusers' names of what sees the caption's tokens only, in blocks with two streams
TEXT_SIDE = re.compile(r"add_[qkv]_proj|to_add_out|_context|txt_|text_")
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


class PlannedAdapter(NamedTuple):
    """An adapter as it is planned."""

    parameters: int
    layers: int
    """Layers that have one."""
    kept: Kept
    """Bytes that it keeps in a micro-batch."""
    spared: Spared
    """Bytes that a block of each stack does not keep, since layers of it are frozen."""
    of_head: bool = False
    """Whether a language model's head has one."""


def planned_adapter(
    family: Family,
    config: RunConfig,
    trained: ComponentGeometry,
    model_config: Mapping[str, Any],
    shape: Shape,
    sources: Mapping[str, str],
) -> PlannedAdapter:
    """The adapter of a run with micro-batches of `shape`; of a full fine-tune none.

    `sources` says where keys were written. Raises ConfigError where a layer that is to have an adapter is
    none of the model's.
    """
    if config.method == "full":
        return PlannedAdapter(0, 0, NOTHING_KEPT, {})
    lora, linears, modulation = config.lora, dict(trained.linears), parted(trained, family.modulation)[0]
    attention = family.attention_shape(model_config, shape)
    # transformers' models have an embedding among their matrices, and a head that may share it, which files
    # leave out
    embedding = next((name for name in linears if name.rpartition(".")[2] == _EMBEDDING), None)
    if embedding is not None:
        linears.setdefault(_HEAD, linears.pop(embedding))
    expression = re.compile(target_pattern(lora, family.lora_targets, linears, sources))
    adapted = {name: size for name, size in linears.items() if expression.fullmatch(name)}

    def tokens_of(name: str) -> int:
        if name in modulation:  # one a sample
            return attention.batch_size
        if TEXT_SIDE.search(name):
            return shape.batch_size * shape.text_tokens
        return attention.batch_size * attention.tokens

    kept = kept_bytes(adapted, lora, tokens_of, shape.bytes_per_value)
    spared: Spared = {}
    if not isinstance(lora.target_modules, str):
        width = model_config.get("hidden_size", attention.heads * attention.head_width)
        # what is narrower may be kept for something else, as attention keeps its output
        wide = {name: size for name, size in linears.items() if size[1] > width and name not in modulation}
        first, every = (re.compile(family.lora_targets[preset]) for preset in ("attention", "all-linear"))
        spared = spared_bytes(
            {name: size for name, size in wide.items() if every.fullmatch(name) and name not in adapted},
            lambda name: tokens_of(name) * shape.bytes_per_value,
            first,
        )
    return PlannedAdapter(adapter_parameters(adapted, lora), len(adapted), kept, spared, _HEAD in adapted)


def spared_bytes(
    frozen: Mapping[str, Size], value_bytes: Callable[[str], int], attention: re.Pattern[str]
) -> Spared:
    """Bytes of the inputs of frozen layers that an adapter on all linears keeps: of those that one on
    `attention` keeps too, and of the others; the least of all blocks of a stack.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for block, inside in by_block(frozen).items():
        sizes = {name: into * value_bytes(name) for name, (_, into) in inside.items()}
        near = sum(size for name, size in sizes.items() if attention.fullmatch(name))
        found.setdefault(block.rpartition(".")[0], []).append((near, sum(sizes.values()) - near))
    return {stack: (min(a for a, _ in each), min(b for _, b in each)) for stack, each in found.items()}


def adapter_parameters(adapted: Mapping[str, Size], lora: LoraSection) -> int:
    """Parameters of an adapter on these linear layers, (out, in) by name."""
    total = 0
    for name, (out, into) in adapted.items():
        rank = int(pattern_value(lora.rank_pattern, name, lora.rank))
        if lora.type != "lokr":
            total += rank * (out + into) + (out if lora.type == "dora" else 0)
            continue
        (left_out, right_out), (left_in, right_in) = _near_square(out), _near_square(into)
        # peft keeps the right factor whole where two of this rank would not be smaller
        whole = rank >= max(right_out, right_in) / 2
        total += left_out * left_in + (right_out * right_in if whole else rank * (right_out + right_in))
    return total


def _near_square(dimension: int) -> tuple[int, int]:
    """The two factors nearest each other, the smaller one first: peft's with decompose_factor -1."""
    first = next(n for n in range(math.isqrt(dimension), 0, -1) if dimension % n == 0)
    return first, dimension // first


def kept_bytes(
    adapted: Mapping[str, Size], lora: LoraSection, tokens_of: Callable[[str], int], value_bytes: int
) -> Kept:
    """Bytes that peft's layers hold for `lora.type` and `lora.dropout`, counted as autograd saves them.

    DoRA: the base's output and the adapter's; while it computes its change, the changed weight and what they
    are made of. LoKr: the change, as large as the weight. Dropout: the input that is left, and its mask. A
    plain LoRA of a higher rank than was counted: the inner values, and of layers that share an input their
    right sides in one matrix, which is mostly zeros.
    """
    beyond = 0
    siblings = Counter((name.rpartition(".")[0], size, tokens_of(name)) for name, size in adapted.items())
    layers: dict[str, int] = {}
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
        layers[name] = kept
    largest: dict[str, int] = {}
    for block, inside in by_block(layers).items():
        stack, size = block.rpartition(".")[0], sum(inside.values())
        largest[stack] = max(largest.get(stack, 0), size)
        beyond -= size
    return largest, beyond + sum(layers.values())


def plain_path(config: RunConfig) -> str:
    """The option because of which blocks are neither compiled nor wait in host memory; empty without one.

    What makes a run fast was tuned and proved for plain LoRA and full fine-tunes in bf16.
    """
    if needs_whole_base(config):
        return f"lora.type: {config.lora.type}"
    if config.method == "lora" and config.lora.dropout:
        return f"lora.dropout: {config.lora.dropout:g}"
    return "model.dtype: fp16" if config.model.dtype == "fp16" else ""


def needs_whole_base(config: RunConfig) -> bool:
    """True if the adapter needs an unquantised base: its file could not be proved on a quantised one."""
    return config.method == "lora" and config.lora.type != "lora"
