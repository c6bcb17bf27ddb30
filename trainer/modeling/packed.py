"""Floor 4: causal attention over several samples in one row, for transformers' models, without masks.

transformers passes what a model is called with on to its attention layers, and makes no mask for an attention
function that it has no mask function for. So a model that is called with `segments` (the samples' lengths in
the row, host integers) attends inside each sample only: one causal kernel call a sample, nothing of size
tokens x tokens. Position ids must restart with every sample; that is the caller's part.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from trainer.modeling.attention import BACKENDS, attend, selected


def implementation(kernel: str) -> str:
    """Name of a kernel's attention function in transformers.

    It must not hold the word "flash", from which transformers concludes that its own flash attention is asked
    for.
    """
    return f"trainer_packed_{list(BACKENDS).index(kernel)}"


def set_packed_attention(model: Any, kernel: str) -> None:
    """Make every attention layer of a transformers model use the plan's kernel, sample by sample."""
    from transformers import AttentionInterface

    name = implementation(kernel)
    AttentionInterface.register(name, functools.partial(_forward, kernel))
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == name, f"{type(model).__name__} keeps its own attention"


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernel: str,
    *,
    segments: Sequence[int],
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention inside each of `segments`, whose lengths add up to the tokens.

    Query (B, heads, tokens, width), key and value (B, key heads, tokens, width); the result is
    (B, tokens, heads, width). Raises RuntimeError when the kernel does not take the inputs.
    """
    lengths = list(segments)
    queries, keys, values = (tensor.transpose(1, 2).split(lengths, dim=1) for tensor in (query, key, value))
    with selected(kernel):
        outputs = [
            attend(*tensors, kernel=kernel, causal=True, scale=scale, dropout=dropout)
            for tensors in zip(queries, keys, values, strict=True)
        ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _forward(
    kernel: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Sequence[int] | None = None,
    **_: Any,  # whatever else the model was called with, as use_cache
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature; without `segments` a row is one sample."""
    assert attention_mask is None, "packed attention knows no masks"
    if query.shape[2] == key.shape[2]:
        lengths = segments or (query.shape[2],)
        output = packed_attention(query, key, value, kernel, segments=lengths, scale=scaling, dropout=dropout)
        return output, None
    # generation: the newest token reads all keys of the cache, by whatever kernel takes one query
    assert query.shape[2] == 1 and segments is None, "with a key cache, one token at a time"
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2), None
