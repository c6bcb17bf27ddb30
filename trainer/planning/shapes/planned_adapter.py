"""The adapter that a configuration asks for, on a model's layers. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from trainer.config.schema import RunConfig
from trainer.families.family import Family
from trainer.families.values import AttentionShape, Shape
from trainer.modeling.adapter.targets import target_pattern
from trainer.planning.shapes.adapters import (
    COUNTED_RANK,
    NOTHING_KEPT,
    Kept,
    adapted_layers,
    adapter_parameters,
    kept_bytes,
)
from trainer.planning.shapes.geometry import ComponentGeometry

# diffusers' names of what sees the caption's tokens only, in blocks with two streams
TEXT_SIDE = re.compile(r"add_[qkv]_proj|to_add_out|_context|txt_|text_")
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


class PlannedAdapter(NamedTuple):
    """How large it is, and what it holds beyond a plain LoRA, whose activations are part of the counts."""

    parameters: int
    layers: int
    kept: Kept


def planned_adapter(
    family: Family,
    config: RunConfig,
    trained: ComponentGeometry,
    attention: AttentionShape,
    shape: Shape,
    sources: Mapping[str, str],
) -> PlannedAdapter:
    """Of a micro-batch of `shape`; nothing in a full fine-tune. `sources` says where keys were written.

    Raises ConfigError where a layer that is to have an adapter is none of the model's.
    """
    if config.method == "full":
        return PlannedAdapter(0, 0, NOTHING_KEPT)
    lora, modulation = config.lora, trained.matching(family.modulation)
    linears = _linears(trained)
    pattern = target_pattern(lora, family.lora_targets, linears, sources)
    parameters, layers = adapter_parameters(linears, pattern, lora), adapted_layers(linears, pattern)
    counted = lora.type == "lora" and max(lora.rank, *lora.rank_pattern.values(), 0) <= COUNTED_RANK
    if counted and not lora.dropout:
        return PlannedAdapter(parameters, layers, NOTHING_KEPT)

    def tokens_of(name: str) -> int:
        if name in modulation:  # one a sample
            return attention.batch_size
        if TEXT_SIDE.search(name):
            return shape.batch_size * shape.text_tokens
        return attention.batch_size * attention.tokens

    kept = kept_bytes(linears, pattern, lora, tokens_of, shape.bytes_per_value)
    return PlannedAdapter(parameters, layers, kept)


def _linears(trained: ComponentGeometry) -> dict[str, tuple[int, int]]:
    """(out, in) by name of what can have an adapter. transformers' models have an embedding among their
    matrices, and a head that may share it, which files leave out.
    """
    found = dict(trained.linears)
    embedding = next((name for name in found if name.rpartition(".")[2] == _EMBEDDING), None)
    if embedding is not None:
        size = found.pop(embedding)
        found.setdefault(_HEAD, size)
    return found
