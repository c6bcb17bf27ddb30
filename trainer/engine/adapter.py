"""Floor 6: the adapter that a configuration asks for, on a model's layers. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from trainer.config.schema import RunConfig
from trainer.families.protocol import AttentionShape, Family, Shape
from trainer.hardware.adapters import COUNTED_RANK, NOTHING_KEPT, Kept, adapter_parameters, kept_bytes
from trainer.hardware.geometry import ComponentGeometry
from trainer.modeling.targets import TARGETS, require_matches, target_pattern

# diffusers' names of what sees the caption's tokens only, in blocks with two streams
TEXT_SIDE = re.compile(r"add_[qkv]_proj|to_add_out|_context|txt_|text_")


class PlannedAdapter(NamedTuple):
    """How large it is, and what it holds beyond a plain LoRA, whose activations are part of the counts."""

    parameters: int
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
        return PlannedAdapter(0, NOTHING_KEPT)
    lora, modulation = config.lora, trained.matching(family.modulation)
    pattern = _pattern(family, config, trained.linears, sources)
    parameters = adapter_parameters(trained.linears, pattern, lora)
    counted = lora.type == "lora" and max(lora.rank, *lora.rank_pattern.values(), 0) <= COUNTED_RANK
    if counted and not lora.dropout:
        return PlannedAdapter(parameters, NOTHING_KEPT)

    def tokens_of(name: str) -> int:
        if name in modulation:  # one a sample
            return attention.batch_size
        if TEXT_SIDE.search(name):
            return shape.batch_size * shape.text_tokens
        return attention.batch_size * attention.tokens

    kept = kept_bytes(trained.linears, pattern, lora, tokens_of, shape.bytes_per_value)
    return PlannedAdapter(parameters, kept)


def _pattern(family: Family, config: RunConfig, linears: Collection[str], sources: Mapping[str, str]) -> str:
    """Of names of layers that get an adapter."""
    lora, where = config.lora, sources.get(TARGETS, "")
    pattern = target_pattern(lora.target_modules, family.lora_targets, linears, where=where)
    expression = re.compile(pattern)
    targets = [name for name in linears if expression.fullmatch(name)]
    for key, values in (("lora.rank_pattern", lora.rank_pattern), ("lora.alpha_pattern", lora.alpha_pattern)):
        require_matches(values, targets, key, where=sources.get(key, ""))
    return pattern
